"""What training loads: a run's rows in memory, and the order in which they come.

N rows, C channels, H x W pixels.
"""

from dataclasses import dataclass
from functools import lru_cache

import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from ddm_ray.core.streams import ORDER, stream
from ddm_ray.data.schema import TRAIN, images, read_artifact
from ddm_ray.storage.run import Run


@dataclass(frozen=True)
class Rows:
    """Rows of one split, sorted by id: data_NCHW float32 in [-1, 1], label_N and cluster_N int64."""

    ids: list[str]
    data_NCHW: Tensor
    label_N: Tensor
    cluster_N: Tensor

    def __len__(self) -> int:
        return len(self.ids)


def load_rows(run: Run, artifacts: list[str], split: str = TRAIN) -> Rows:
    """The rows of one or more shards, in an order that doesn't depend on that of `artifacts`.

    Raises MissingArtifact, DriftError, and CorruptArtifact for a file whose checksum isn't its manifest's.
    """
    table = pa.concat_tables([read_artifact(run, artifact) for artifact in artifacts])
    table = table.filter(pc.field("split") == split).sort_by("id")
    return Rows(
        ids=table["id"].to_pylist(),
        data_NCHW=torch.from_numpy(images(table, run.config.data.shape).copy()),
        label_N=torch.tensor(table["label"].to_pylist(), dtype=torch.int64),
        cluster_N=torch.tensor(table["cluster"].to_pylist(), dtype=torch.int64),
    )


def row_order(seed: int, num_rows: int, step: int, batch: int) -> Tensor:
    """positions int64 (batch,) in 0..num_rows-1 of the rows of global batch `step`, counted from 0.

    Batches cut an endless stream of permutations, one an epoch, each drawn from (seed, epoch) alone:
    the tail of an epoch joins the next, and any step is computed without those before it.
    """
    epoch, first = divmod(step * batch, num_rows)
    pieces: list[Tensor] = []
    wanted = batch
    while wanted:
        piece = _permutation(seed, num_rows, epoch)[first : first + wanted]
        pieces.append(piece)
        wanted -= len(piece)
        epoch, first = epoch + 1, 0
    return torch.cat(pieces)


@lru_cache(maxsize=4)
def _permutation(seed: int, num_rows: int, epoch: int) -> Tensor:
    return torch.from_numpy(stream(seed, ORDER, epoch).permutation(num_rows))
