"""Training without Ray: this process is one rank of a torch.distributed world, usually the only one."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from ddm_ray.placement import TrainPlacement
from ddm_ray.run.graph import Artifact
from ddm_ray.store.retries import LONG_RETRIES, RetryPolicy
from ddm_ray.train import worker
from ddm_ray.train.ranks import backend


@contextmanager
def world(rank: int = 0, size: int = 1, rendezvous: str | Path | None = None) -> Iterator[None]:
    """Make this process rank `rank` of a world of `size` ranks on this machine, which meet at the file `rendezvous`.

    A world of one needs no file. A process can do this once: DeepSpeed keeps the first world that it sees.
    """
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
    store = dist.HashStore() if rendezvous is None else dist.FileStore(str(rendezvous), size)
    on_gpu = torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"
    dist.init_process_group(backend(on_gpu), store=store, rank=rank, world_size=size)
    yield
    # Not after an error: a frozen rank would keep the others waiting here.
    dist.destroy_process_group()


def train_locally(
    run_url: str,
    artifacts: Iterable[Artifact],
    placement: TrainPlacement | None = None,
    retry_policy: RetryPolicy = LONG_RETRIES,
) -> None:
    """Train artifacts of a run one after another in this process, except finished ones.

    Raises what `worker.train` does. Called again, it goes on from the last states.
    """
    with world():
        for artifact in artifacts:
            worker.train(run_url, artifact, placement or TrainPlacement(), retry_policy=retry_policy)
