"""The torch.distributed world of Ray Train's workers: what TorchConfig leaves to the environment of each worker."""

import os
from typing import Any

from ddm_ray.placement import TrainPlacement

# Longer than any rank may save or load: the watchdog ends a rank that hangs at its work.
COLLECTIVE_SECONDS = 1800


def job_environment(placement: TrainPlacement) -> dict[str, Any]:
    """The runtime environment of a training's Ray job, which its controller and its workers inherit."""
    variables = {
        # Time for a placement group to find its nodes; 60 s by default. An elastic one may count on a node just lost.
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "20" if placement.workers.elastic else "600",
        # Time for ranks to take leave of each other; 30 s by default. Next to one that was lost they never do.
        "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S": "2",
    }
    if not placement.use_gpu:
        variables["DS_ACCELERATOR"] = "cpu"  # DeepSpeed would take any GPU that it sees
    return {"env_vars": variables, "worker_process_setup_hook": f"{__name__}.{choose_interface.__name__}"}


def choose_interface() -> None:
    """Have gloo talk by the network interface at which Ray knows this node; called in each process as it begins.

    By itself gloo takes the one that the host's own name stands for, which other nodes may not reach.
    """
    import ray

    from ddm_ray.ray_session import interface_of

    if interface := interface_of(ray.util.get_node_ip_address()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def alone(use_gpu: bool) -> None:
    """Have a world of one meet in this process, and gloo listen on this machine alone.

    TorchConfig's store listens on all addresses, and anybody could write to it.
    """
    import torch.distributed as dist

    from ddm_ray.ray_session import interface_of
    from ddm_ray.train.ranks import backend

    if dist.get_world_size() > 1:
        return
    dist.destroy_process_group()
    if loopback := interface_of("127.0.0.1"):
        os.environ["GLOO_SOCKET_IFNAME"] = loopback
    dist.init_process_group(backend(use_gpu), store=dist.HashStore(), rank=0, world_size=1)
