"""Direct ingress: Serve's replicas of the ingress listen themselves, and its controller tells where."""

from collections.abc import Callable

import ray

from ddm_ray.ray_internals import SERVE_CLIENT
from ddm_ray.serve.haproxy import Address

ANSWER_S = 5.0


def local_replicas(application: str, proxy_port: int) -> Callable[[], list[Address]]:
    """A function that tells where the replicas of an application's ingress listen, on the loopback of this machine.

    It gives none where one of them is on another machine: Serve's proxies then part requests among all. It raises
    what Ray raises where the controller doesn't answer. Call both while Serve runs; the controller may die meanwhile.
    """
    controller = SERVE_CLIENT.get()()._controller
    here = ray.util.get_node_ip_address()

    def addresses() -> list[Address]:
        groups = ray.get(controller.get_target_groups.remote(application), timeout=ANSWER_S)
        # Where there is no replica, or Serve doesn't have them listen, they are the proxies'.
        targets = [each for group in groups for each in group.targets if group.protocol == "HTTP"]
        targets = [each for each in targets if each.port != proxy_port]
        if any(each.ip != here for each in targets):
            return []
        return [("127.0.0.1", each.port) for each in targets]

    return addresses
