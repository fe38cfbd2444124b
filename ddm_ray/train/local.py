"""Training without Ray: this process as one rank of a torch.distributed world, mostly as the only one."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from ddm_ray.placement import TrainPlacement
from ddm_ray.storage.graph import Artifact
from ddm_ray.train import worker

# Longer than any rank may save or load: a rank that hangs is its watchdog's affair.
PATIENCE = timedelta(minutes=30)


@contextmanager
def world(
    rank: int = 0,
    size: int = 1,
    store: dist.Store | None = None,
    local: tuple[int, int] | None = None,
    backend: str | None = None,
) -> Iterator[None]:
    """Make this process rank `rank` of a world of `size` ranks, which meet at `store`.

    A world of one needs no store. `local`: rank and size among those on this machine; none: all are. `backend`: nccl
    or gloo; none: nccl where there is a GPU. Once a process: DeepSpeed keeps the first world that it sees.
    """
    local_rank, local_size = local or (rank, size)
    os.environ |= {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(local_size)}
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    dist.init_process_group(backend, store=store or dist.HashStore(), rank=rank, world_size=size, timeout=PATIENCE)
    yield
    # Not after an error: next to a frozen rank the others would wait for its farewell.
    dist.destroy_process_group()


def train(run_url: str, artifacts: Iterable[Artifact], placement: TrainPlacement | None = None) -> None:
    """Train artifacts of a run one after another in this process; those that are finished are left alone.

    Raises what `worker.train` does. Called again, it goes on from the last states.
    """
    with world():
        for artifact in artifacts:
            worker.train(run_url, artifact, placement or TrainPlacement())
