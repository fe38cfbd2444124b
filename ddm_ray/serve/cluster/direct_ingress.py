"""Direct ingress: Serve's replicas of the ingress listen themselves, and its controller tells where."""

from collections.abc import Callable, Sequence

import ray
from ray.serve.schema import TargetGroup

from ddm_ray.ray_internals import SERVE_CLIENT
from ddm_ray.serve.cluster.addresses import Address

ANSWER_S = 2.0


def local_replicas(application: str, proxy_port: int) -> Callable[[], list[Address]]:
    """A function that tells where the replicas of an application's ingress listen, as `on_loopback` has it.

    It raises what Ray raises where the controller doesn't answer. Call it while Serve runs; the controller may die
    meanwhile, and is asked again when it is back.
    """
    controller = SERVE_CLIENT.get()()._controller
    here = ray.util.get_node_ip_address()

    def addresses() -> list[Address]:
        groups = ray.get(controller.get_target_groups.remote(), timeout=ANSWER_S)
        return on_loopback(groups, application, (here, proxy_port))

    return addresses


def on_loopback(groups: Sequence[TargetGroup], application: str, proxy: Address) -> list[Address]:
    """The addresses of an application's replicas that listen on the loopback of this machine, which has the proxy.

    None where one is on another machine, or where there are other applications: the proxy parts requests among all.
    None where the controller names proxies, as it does while there is no replica, or where none is to listen.
    """
    groups = [group for group in groups if group.protocol == "HTTP"]
    targets = [(target.ip, target.port) for group in groups for target in group.targets]
    targets = [target for target in targets if target != proxy]
    if {group.app_name for group in groups} != {application} or any(host != proxy[0] for host, _ in targets):
        return []
    return [("127.0.0.1", port) for _, port in targets]
