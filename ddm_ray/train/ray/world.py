"""The torch.distributed world of Ray Train's workers, made by these: nobody else, who starts them, loads torch."""

from collections.abc import Iterator
from contextlib import contextmanager

import ray.train
import ray.util
import torch
import torch.distributed as dist
from ray.train.collective import broadcast_from_rank_zero

from ddm_ray.train.local import world


@contextmanager
def worker_world(use_gpu: bool) -> Iterator[None]:
    """Make this Ray Train worker a rank of its group's world, on its own GPU if it uses one."""
    context = ray.train.get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    if use_gpu:
        from ray.train.torch import get_device

        torch.cuda.set_device(get_device())
    store = _meet(rank, size) if size > 1 else None
    local = (context.get_local_rank(), context.get_local_world_size())
    with world(rank, size, store, local, backend="nccl" if use_gpu else "gloo"):
        yield


def _meet(rank: int, size: int) -> dist.Store:
    """A store at rank 0, on a port that the operating system picks, which the others hear of through Ray."""
    if rank:
        host, port = broadcast_from_rank_zero(None)
        return dist.TCPStore(host, port, size)
    host = ray.util.get_node_ip_address()
    store = dist.TCPStore(host, 0, size, is_master=True, wait_for_workers=False)
    broadcast_from_rank_zero((host, store.port))
    return store
