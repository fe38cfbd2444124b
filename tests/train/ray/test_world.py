"""The world of Ray Train's workers: what only a GPU would show, by pretending one. Real worlds are in test_faults."""

import os
import socket
import subprocess
import sys

import psutil
import pytest
import ray.util

from ddm_ray.placement import TrainPlacement
from ddm_ray.ray_session import interface_of
from ddm_ray.train.ranks import backend
from ddm_ray.train.ray import world

pytestmark = pytest.mark.integration

ALONE = """
import os, socket
import psutil
import torch.distributed as dist
from ddm_ray.train.ray.world import alone

def listening():
    return {each.laddr for each in psutil.Process().net_connections("inet") if each.status == "LISTEN"}

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
dist.init_process_group("gloo", rank=0, world_size=1)
assert any(address.port == port for address in listening()), "as TorchConfig leaves it"
os.environ["GLOO_SOCKET_IFNAME"] = next((name for name in psutil.net_if_addrs() if name != "lo"), "lo")
alone(use_gpu=False)
assert all(address.ip == "127.0.0.1" and address.port != port for address in listening()), listening()
dist.barrier()
"""


def test_a_worker_alone_listens_on_this_machine_alone() -> None:
    subprocess.run([sys.executable, "-c", ALONE], check=True, timeout=120)


def test_deepspeed_takes_no_gpu_of_a_training_that_asks_for_none() -> None:
    environments = [world.job_environment(TrainPlacement(use_gpu=use_gpu))["env_vars"] for use_gpu in (False, True)]
    assert [each.get("DS_ACCELERATOR") for each in environments] == ["cpu", None]
    assert [backend(use_gpu) for use_gpu in (False, True)] == ["gloo", "cpu:gloo,cuda:nccl"]


def test_gloo_talks_by_the_interface_that_ray_knows_the_node_by(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = {
        each.address: name
        for name, each_of in psutil.net_if_addrs().items()
        for each in each_of
        if each.family == socket.AF_INET
    }
    for address, interface in addresses.items():
        monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
        monkeypatch.setattr(ray.util, "get_node_ip_address", lambda address=address: address)
        world.choose_interface()
        assert os.environ["GLOO_SOCKET_IFNAME"] == interface
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "one's own")
    world.choose_interface()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "one's own"
    assert interface_of("203.0.113.9") is None, "an address that others know it by alone"
