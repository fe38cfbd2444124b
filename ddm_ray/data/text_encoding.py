"""Encodes texts that are stored as token ids (`data.text.stored`) with the run's own text encoder.

Shapes: B rows, L tokens of E channels, P channels of a pooled text.
"""

import os
from dataclasses import dataclass
from typing import Self

import torch

from ddm_ray.core.condition import Text, TextIds, join, with_null
from ddm_ray.core.transfer import frozen_dtype
from ddm_ray.data.loading.shard_files import null_text_of, require_shard
from ddm_ray.errors import CorruptArtifact
from ddm_ray.models.text import TextEncoder
from ddm_ray.run.graph import Artifact
from ddm_ray.run.info import ShardInfo
from ddm_ray.run.run import Run

FIRST = (None, "", "0")
"""Values of LOCAL_RANK in a single process, or in the first process of a machine."""
ROWS = 64
"""Rows that are encoded at a time."""


@dataclass(frozen=True)
class StoredTexts:
    """Encodes stored ids to conditions on the encoder's device. `null`: the empty prompt's text, for dropped rows."""

    encoder: TextEncoder
    null: Text

    @classmethod
    def of(cls, run: Run, shard: Artifact, device: torch.device | str) -> Self | None:
        """The encoder for a run's shards, by any one of them; None if rows store features, or have no texts.

        On a GPU the encoder computes in bf16. Raises as `TextEncoder.from_config`, and DriftError if the shard's ids
        are of another encoder. Only the first rank of a machine checks this.
        """
        config, null = run.config.data.text, null_text_of(run, shard)
        if config is None or null is None or config.stored == "features":
            return None
        known = ShardInfo.of(require_shard(run, shard)).networks.get("text encoder")
        if known is None:
            raise CorruptArtifact(
                f"{run.url}/{shard}: doesn't say which text encoder its ids are of", run.remake(shard)
            )
        encoder = TextEncoder.from_config(config, known if os.environ.get("LOCAL_RANK") in FIRST else None)
        return cls(encoder.to(device, frozen_dtype(device)), null.to(device))

    def __call__(self, ids: TextIds) -> Text:
        """Encode ids that are on the CPU to float32 texts; dropped rows get the null text.

        Raises CorruptArtifact for an id that the encoder doesn't have.
        """
        self.require_known(ids)
        moved = ids.to(self.encoder.model.device, non_blocking=True)
        text, drop_B = self.encoder.encode_ids(moved), moved.dropped_B
        return text if drop_B is None else with_null(text, drop_B, self.null)

    def require_known(self, ids: TextIds) -> None:
        """Raise CorruptArtifact for ids, on the CPU, that the encoder doesn't have, or for more ids than it reads."""
        for encoder, own in ((self.encoder, ids), (self.encoder.pooled, ids.pooled)):
            if own is None or encoder is None:
                continue
            least, most = own.ids_BL.aminmax()
            known = encoder.model.get_input_embeddings().num_embeddings
            wrong = f"token {int(most if most >= known else least)} of {known}" if least < 0 or most >= known else ""
            if own.ids_BL.shape[1] > encoder.tokens:
                wrong = f"{own.ids_BL.shape[1]} tokens of {encoder.tokens}"
            if wrong:
                raise CorruptArtifact(
                    f"a row's text has {wrong} that the text encoder knows; prepare and partition the run again"
                )


def encoded(run: Run, shard: Artifact, ids: TextIds, device: str) -> Text:
    """Encode texts of a shard on `device`, a few at a time; the result is on the CPU. Raises as StoredTexts."""
    texts = StoredTexts.of(run, shard, device)
    assert texts is not None
    every = join([texts(ids[first : first + ROWS]).to("cpu") for first in range(0, len(ids), ROWS)])
    assert isinstance(every, Text)
    return every
