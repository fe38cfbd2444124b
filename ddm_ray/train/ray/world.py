"""The torch.distributed world of Ray Train's workers: settings that TorchConfig leaves to each worker's environment."""

import os
from typing import Any

from ddm_ray.placement import TrainPlacement

# Longer than any rank saves or loads; a rank that hangs in a step is ended by its watchdog long before.
COLLECTIVE_SECONDS = 1800


def job_environment(placement: TrainPlacement) -> dict[str, Any]:
    """The runtime environment of a training's Ray job, which its controller and its workers inherit."""
    variables = {
        # Time for a placement group to find its nodes; 60 s by default. An elastic one may wait for a node just lost.
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "20" if placement.workers.elastic else "600",
        # Time for ranks to close their connections; 30 s by default. With a lost rank they never do.
        "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S": "2",
    }
    if not placement.use_gpu:
        variables["DS_ACCELERATOR"] = "cpu"  # DeepSpeed would take any GPU that it sees
    return {"env_vars": variables, "worker_process_setup_hook": f"{__name__}.{choose_interface.__name__}"}


def choose_interface() -> None:
    """Make gloo use the network interface at which Ray knows this node. Called at the start of each process.

    By default gloo uses the interface of the host's own name, which other nodes may not reach.
    """
    import ray

    from ddm_ray.environment import prepare_ray
    from ddm_ray.ray_session import interface_of

    prepare_ray()
    if interface := interface_of(ray.util.get_node_ip_address()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def alone(use_gpu: bool) -> None:
    """Make a world of one meet in this process, with gloo listening on this machine only.

    TorchConfig's store listens on all addresses, so that any machine could write to it.
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
