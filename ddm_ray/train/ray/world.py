"""The torch.distributed world of Ray Train's workers: what Ray's TorchConfig does, with torch in the workers alone.

A supervisor and a controller do without it, so a start is seconds shorter; a world of one opens no port.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import ray
import ray.train
from ray.exceptions import GetTimeoutError
from ray.train.backend import Backend, BackendConfig

# Longer than any rank may save or load: a rank that hangs at its work is its watchdog's affair.
PATIENCE = timedelta(minutes=30)
# Limit on how long ranks take leave of each other: next to a frozen one they never do.
FAREWELL_SECONDS = 2.0


class WorldBackend(Backend):
    """Has workers meet, and take leave: the controller calls it."""

    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Have all workers join a world, which meets at rank 0."""
        size = len(worker_group)
        address = worker_group.execute_single(0, open_store, size) if size > 1 else None
        ranks = range(size)
        ray.get([worker_group.execute_single_async(rank, join, address, backend_config.use_gpu) for rank in ranks])

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        """Have the workers take leave, for a moment at most."""
        with suppress(GetTimeoutError):  # Ray ends them anyway
            ray.get(worker_group.execute_async(leave), timeout=FAREWELL_SECONDS)


class World(BackendConfig):
    """A world of gloo, and of nccl with a GPU a worker."""

    def __init__(self, use_gpu: bool):
        self.use_gpu = use_gpu

    @property
    def backend_cls(self) -> type[Backend]:
        return WorldBackend

    @property
    def train_func_context(self) -> Any:
        return on_own_device if self.use_gpu else super().train_func_context


@contextmanager
def on_own_device() -> Iterator[None]:
    """Make the worker's GPU the current one of this thread, in which it trains."""
    import torch
    from ray.train.torch import get_device

    torch.cuda.set_device(get_device())
    yield


_opened: dict[str, Any] = {}


def open_store(size: int) -> tuple[str, int]:
    """Open the store of a world in this worker, on a port that the operating system picks; its address."""
    from torch.distributed import TCPStore

    host = ray.util.get_node_ip_address()
    _opened["store"] = TCPStore(host, 0, size, is_master=True, wait_for_workers=False, timeout=PATIENCE)
    return host, _opened["store"].port


def join(address: tuple[str, int] | None, use_gpu: bool) -> None:
    """Make this worker a rank of the world whose store is at an address (host, port); a world of one needs none.

    Raises torch's DistError if the others don't come within PATIENCE.
    """
    import torch.distributed as dist

    from ddm_ray.train.consensus import backend

    context = ray.train.get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    ranks = {"RANK": rank, "LOCAL_RANK": context.get_local_rank(), "NODE_RANK": context.get_node_rank()}
    sizes = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": context.get_local_world_size()}
    os.environ |= {name: str(value) for name, value in (ranks | sizes).items()}
    if use_gpu:
        # A lost rank is an error that is raised, not an abort of the process.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    else:
        os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed, which isn't loaded yet, would take any GPU that it sees
    if size > 1 and (interface := interface_of(ray.util.get_node_ip_address())):
        # By itself gloo takes the one that the host's own name stands for, which others may not reach.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if address is None:
        store: dist.Store = dist.HashStore()
    else:
        store = _opened.pop("store", None) or dist.TCPStore(*address, size, timeout=PATIENCE)
    dist.init_process_group(backend(use_gpu), store=store, rank=rank, world_size=size, timeout=PATIENCE)


def interface_of(address: str) -> str | None:
    """The network interface that has this address; None if none has, as behind some clouds' own."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return str(name)
    return None


def leave() -> None:
    """Leave the world."""
    import torch.distributed as dist

    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.destroy_process_group()
