"""Real rows of a run as an evaluation needs them: to compare with, and for the conditions that it asks for.

Shapes: N rows, M images.
"""

import math

import numpy as np
import torch

from ddm_ray.config import DataConfig
from ddm_ray.core.condition import Condition
from ddm_ray.data.loading.loader import Rows, load_rows
from ddm_ray.data.schema import HELDOUT, TRAIN
from ddm_ray.errors import DataError
from ddm_ray.storage.graph import shard
from ddm_ray.storage.run import Run

KEPT_BYTES = 2**29
"""Bytes of real rows in memory, at most; of a larger set so many are drawn."""
FLOAT_BYTES = 4


def real_rows(run: Run, split: str) -> Rows:
    """The rows of all shards, or as many of them as KEPT_BYTES hold, drawn; training rows without texts.

    Raises DataError for less than 2 training rows, MissingArtifact, DriftError, CorruptArtifact.
    """
    with_texts = split == HELDOUT
    rows = _rows(run, split, with_texts)
    if split == TRAIN and len(rows) < 2:
        raise DataError(f"{len(rows)} training rows in the run's shards: an evaluation needs 2 or more")
    return rows


def captioned_rows(run: Run) -> Rows:
    """Rows whose texts an evaluation asks for: held-out ones, or training rows where none is held out."""
    heldout = _rows(run, HELDOUT, with_texts=True)
    return heldout if len(heldout) else _rows(run, TRAIN, with_texts=True)


def prompts(run: Run, captioned: Rows | None = None) -> Condition:
    """Conditions that an evaluation's numbers stand for: all classes and none, or the texts of `captioned_rows`."""
    if run.config.data.text is None:
        return torch.arange((run.config.data.num_classes or 0) + 1)
    return (captioned or captioned_rows(run)).condition


def numbers_of(run: Run, train: Rows, prompts_N: Condition) -> list[int]:
    """The numbers (M) of the conditions asked for, the same for every model.

    Classes are drawn as frequent as in training rows, texts one after the other in an order of their own, again and
    again.
    """
    count, random = run.config.evaluate.num_samples, np.random.default_rng(run.config.evaluate.seed)
    if run.config.data.text is None:
        drawn: list[int] = train.label_N[torch.from_numpy(random.integers(len(train), size=count))].tolist()
        return drawn
    order = random.permutation(len(prompts_N))
    return [int(order[place % len(order)]) for place in range(count)]


def _rows(run: Run, split: str, with_texts: bool) -> Rows:
    shards = [shard(cluster) for cluster in range(run.config.partition.num_clusters)]
    most = max(2, KEPT_BYTES // _row_bytes(run.config.data, with_texts))
    return load_rows(run, shards, split, most, run.config.evaluate.seed, with_texts)


def _row_bytes(config: DataConfig, with_texts: bool) -> int:
    text = config.text if with_texts else None
    condition = 0 if text is None else text.tokens * text.dim + (text.pooled_dim or 0)
    return FLOAT_BYTES * (math.prod(config.shape) + condition)
