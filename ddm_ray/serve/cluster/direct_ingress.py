"""Direct ingress: replicas of the ingress listen themselves, at addresses that Serve's controller knows."""

from collections.abc import Callable, Sequence

import ray
from ray.serve.schema import TargetGroup

from ddm_ray.ray_internals import SERVE_CLIENT
from ddm_ray.serve.cluster.addresses import Address

ANSWER_S = 2.0


def local_replicas(application: str, proxy_port: int) -> Callable[[], list[Address]]:
    """A function that returns the addresses of the replicas of an application's ingress, as `on_loopback` does.

    Call this while Serve runs. The function raises Ray's errors while the controller doesn't answer; it may be called
    again when the controller is back.
    """
    controller = SERVE_CLIENT.get()()._controller
    here = ray.util.get_node_ip_address()

    def addresses() -> list[Address]:
        groups = ray.get(controller.get_target_groups.remote(), timeout=ANSWER_S)
        return on_loopback(groups, application, (here, proxy_port))

    return addresses


def on_loopback(groups: Sequence[TargetGroup], application: str, proxy: Address) -> list[Address]:
    """Loopback addresses of an application's replicas on this machine, which has the proxy.

    Empty if a replica is on another machine, or if there are other applications: only the proxy parts requests among
    them. Empty also if the controller names only proxies, as while there is no replica or no direct ingress.
    """
    groups = [group for group in groups if group.protocol == "HTTP"]
    targets = [(target.ip, target.port) for group in groups for target in group.targets]
    targets = [target for target in targets if target != proxy]
    if {group.app_name for group in groups} != {application} or any(host != proxy[0] for host, _ in targets):
        return []
    return [("127.0.0.1", port) for _, port in targets]
