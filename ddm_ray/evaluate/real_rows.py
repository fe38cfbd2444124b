"""Real rows of a run for an evaluation: the rows to compare with, and the conditions to sample for.

Shapes: N rows, M images, CHW data.
"""

import math
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch

from ddm_ray.config import DataConfig, EvaluateConfig
from ddm_ray.core.condition import Condition
from ddm_ray.data.loading.loader import Rows, load_rows
from ddm_ray.data.schema import HELDOUT, TRAIN
from ddm_ray.errors import DataError
from ddm_ray.evaluate.candidates import Decode
from ddm_ray.run.graph import Artifact, shards_of
from ddm_ray.run.run import Run
from ddm_ray.spelling import numbered

KEPT_BYTES = 2**30
"""Maximum bytes of real rows in memory, as images and with their texts. A larger set is subsampled."""
HELDOUT_ROWS = 2000
"""Maximum held-out rows: each is noised, and passed to every network, many times."""
FLOAT_BYTES = 4


@dataclass(frozen=True)
class RealRows:
    """Training rows without texts, held-out rows, and the shown rows, which give the texts to sample for.

    If conditions are classes, the shown rows are the training rows; otherwise the held-out rows, or training rows
    with texts if there are no held-out rows. `elsewhere`: clusters with rows that only their owners have.
    """

    train: Rows
    heldout: Rows
    shown: Rows
    elsewhere: list[int]

    @classmethod
    def of(cls, run: Run, device: str = "cpu") -> Self:
        """Load the rows. Texts stored as ids are encoded on `device`.

        Raises DataError for fewer than 2 training rows, MissingArtifact, DriftError, CorruptArtifact.
        """
        every = shards_of(run.config)
        here = [artifact for artifact in every if not run.config.partition.given or _is_here(run, artifact)]
        elsewhere = [artifact.cluster for artifact in every if artifact not in here and artifact.cluster is not None]
        train, heldout = (
            _rows(run, here, TRAIN, with_texts=False),
            _rows(run, here, HELDOUT, with_texts=True, device=device),
        )
        if len(train) < 2:
            where = f"; only their owners have those of {numbered('cluster', elsewhere, 20)}" if elsewhere else ""
            raise DataError(f"{len(train)} training rows in the run's shards{where}: an evaluation needs 2 or more")
        shown = train
        if run.config.data.text is not None:
            shown = heldout if len(heldout) else _rows(run, here, TRAIN, with_texts=True, device=device)
        return cls(train, heldout, shown, elsewhere)

    def decoded(self, decode: Decode) -> Self:
        """The same rows with their data decoded to images."""
        train, heldout = (replace(rows, data_NCHW=decode(rows.data_NCHW)) for rows in (self.train, self.heldout))
        if self.shown is self.train or self.shown is self.heldout:
            shown = train if self.shown is self.train else heldout
        else:
            shown = replace(self.shown, data_NCHW=decode(self.shown.data_NCHW))
        return replace(self, train=train, heldout=heldout, shown=shown)

    def numbers(self, config: EvaluateConfig, prompts_N: Condition) -> list[int]:
        """The numbers (M) of the requested conditions, the same for every model.

        Classes are drawn as frequently as in training rows. Texts are taken in turn, in a shuffled order, repeatedly.
        """
        count, random = config.num_samples, np.random.default_rng(config.seed)
        if self.shown.text is None:
            drawn: list[int] = self.train.label_N[
                torch.from_numpy(random.integers(len(self.train), size=count))
            ].tolist()
            return drawn
        order = random.permutation(len(prompts_N))
        return [int(order[place % len(order)]) for place in range(count)]


def prompts_of(run: Run, rows: RealRows | None = None, device: str = "cpu") -> Condition:
    """The conditions that these numbers index: all classes and the null class, or the texts of the shown rows."""
    if run.config.data.text is None:
        return torch.arange((run.config.data.num_classes or 0) + 1)
    return (rows or RealRows.of(run, device)).shown.condition


def _rows(run: Run, shards: list[Artifact], split: str, with_texts: bool, device: str = "cpu") -> Rows:
    most = max(2, KEPT_BYTES // _row_bytes(run.config.data, with_texts))
    most = min(most, HELDOUT_ROWS) if split == HELDOUT else most
    # Rows with texts are requested by number, also by evaluations begun by an older version: draw them as it did.
    seed = run.config.evaluate.seed if with_texts else None
    return load_rows(run, shards, split, most, seed, with_texts, device)


def _is_here(run: Run, artifact: Artifact) -> bool:
    """False for the shard of an owner that shared only its manifest."""
    return bool(run.store.sizes(artifact).keys() & run.require(artifact).files.keys())


def _row_bytes(config: DataConfig, with_texts: bool) -> int:
    text = config.text if with_texts else None
    condition = 0 if text is None else text.channels
    return FLOAT_BYTES * (math.prod(config.pixel_shape) + condition)
