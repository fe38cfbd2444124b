"""The world of Ray Train's workers: what only a GPU would show, by pretending one. Real worlds are in test_faults."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import ray.train
import ray.train.torch
import torch

from ddm_ray.train.ray import world

NCCL = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def worker(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> dict[str, Any]:
    """Make this process look like a worker; what it would begin a world with."""
    begun: dict[str, Any] = {}
    context = SimpleNamespace(
        get_world_rank=lambda: rank,
        get_world_size=lambda: size,
        get_local_rank=lambda: 0,
        get_local_world_size=lambda: 1,
        get_node_rank=lambda: rank,
    )
    monkeypatch.setattr(ray.train, "get_context", lambda: context)
    monkeypatch.setattr(
        torch.distributed, "init_process_group", lambda backend, **arguments: begun.update(arguments, backend=backend)
    )
    for name in ("DS_ACCELERATOR", "RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "stale")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "one's own")
    monkeypatch.delenv(NCCL, raising=False)
    return begun


@pytest.mark.parametrize(("use_gpu", "backend"), [(False, "gloo"), (True, "cpu:gloo,cuda:nccl")])
def test_two_workers_meet_where_the_first_one_says(
    monkeypatch: pytest.MonkeyPatch, use_gpu: bool, backend: str
) -> None:
    address = world.open_store(2)
    first = worker(monkeypatch, 0, 2)
    world.join(address, use_gpu)
    second = worker(monkeypatch, 1, 2)
    world.join(address, use_gpu)
    assert (first["rank"], second["rank"], first["backend"], second["world_size"]) == (0, 1, backend, 2)
    first["store"].set("key", "value")
    assert second["store"].get("key") == b"value"
    assert first["store"].timeout == second["store"].timeout == first["timeout"] == world.PATIENCE
    assert [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")] == [*"1201"]
    assert os.environ["GLOO_SOCKET_IFNAME"] == "one's own"
    assert os.environ.get(NCCL) == ("1" if use_gpu else None)
    assert os.environ["DS_ACCELERATOR"] == ("stale" if use_gpu else "cpu"), "not on a GPU that it sees"


def test_a_worker_alone_opens_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = worker(monkeypatch, 0, 1)
    world.join(None, False)
    assert isinstance(begun["store"], torch.distributed.HashStore)


def test_a_worker_trains_on_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(ray.train.torch, "get_device", lambda: torch.device("cuda:1"))
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    with world.World(use_gpu=True).train_func_context():
        assert chosen == [torch.device("cuda:1")]
    with world.World(use_gpu=False).train_func_context():
        assert len(chosen) == 1


def test_gloo_talks_by_the_interface_that_ray_knows_the_node_by() -> None:
    assert world.interface_of("127.0.0.1") == "lo"
    assert world.interface_of("203.0.113.9") is None, "an address that others know it by alone"
