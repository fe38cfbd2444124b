"""Encoding of texts whose rows keep their tokens' ids (`data.text.stored`), by the run's own text encoder.

Shapes: B rows, L tokens of E channels, P channels of a pooled text.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch

from ddm_ray.core.condition import Text, TextIds, join, with_null
from ddm_ray.core.transfer import frozen_dtype
from ddm_ray.errors import CorruptArtifact
from ddm_ray.models.text import TextEncoder
from ddm_ray.storage.graph import PARTITION
from ddm_ray.storage.info import PartitionInfo
from ddm_ray.storage.run import Run

ROWS = 64
"""Rows that are encoded at a time where there are many."""


@dataclass(frozen=True)
class StoredTexts:
    """Conditions on the encoder's device, of what rows keep; `null`: the empty prompt's text, of dropped rows."""

    encoder: TextEncoder
    null: Text

    @classmethod
    def of(cls, run: Run, null: Text | None, device: torch.device | str) -> Self | None:
        """The texts of a run, whose encoder computes in bf16 on a GPU; None where rows keep features, or have no texts.

        Raises as `TextEncoder.from_config`, DriftError for another encoder than that whose ids rows keep.
        """
        config, manifest = run.config.data.text, run.manifest(PARTITION)
        if config is None or config.stored == "features":
            return None
        assert null is not None
        known = PartitionInfo.of(manifest).networks.get("text encoder") if manifest else None
        encoder = TextEncoder.from_config(config, known)
        return cls(encoder.to(device, frozen_dtype(device)), null.to(device))

    def __call__(self, ids: TextIds) -> Text:
        """The texts of ids that are on the CPU, float32; the null one where they are dropped.

        Raises CorruptArtifact for an id that the encoder hasn't.
        """
        self._require_known(ids)
        moved = ids.to(self.encoder.model.device, non_blocking=True)
        text, null, drop_B = self.encoder.encode_ids(moved), self.null, moved.dropped_B
        if null.pooled_BP is None:
            text = replace(text, pooled_BP=None)
        return text if drop_B is None else with_null(text, drop_B, null)

    def _require_known(self, ids: TextIds) -> None:
        for encoder, own in ((self.encoder, ids), (self.encoder.pooled, ids.pooled)):
            if own is None or encoder is None or not len(own):
                continue
            least, most = own.ids_BL.aminmax()
            known = encoder.model.get_input_embeddings().num_embeddings
            if least < 0 or most >= known:
                raise CorruptArtifact(
                    f"a row's text has token {int(most if most >= known else least)} of {known} that the text encoder"
                    " knows; prepare and partition the run again"
                )


def encoded(run: Run, ids: TextIds, null: Text | None, device: str) -> Text:
    """Many texts on the CPU, encoded on `device` some at a time. Raises as StoredTexts."""
    texts = StoredTexts.of(run, null, device)
    assert texts is not None
    first, *others = (texts(ids[each : each + ROWS]).to("cpu") for each in range(0, max(1, len(ids)), ROWS))
    every = join([first, *others])
    assert isinstance(every, Text)
    return every
