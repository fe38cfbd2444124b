"""Which of the addresses that Serve's controller names are led to."""

import pytest
from ray.serve.schema import Target, TargetGroup

from ddm_ray.serve.cluster.direct_ingress import on_loopback

PROXY = ("10.0.0.1", 8000)


def group(*targets: tuple[str, int], protocol: str = "HTTP", name: str = "ddm") -> TargetGroup:
    named = [Target(ip=host, port=port, instance_id="", name="") for host, port in targets]
    return TargetGroup(targets=named, route_prefix="/", protocol=protocol, app_name=name)


@pytest.mark.parametrize(
    ("targets", "ports"),
    [
        ([("10.0.0.1", 30000), ("10.0.0.1", 30007)], [30000, 30007]),
        ([("10.0.0.1", 30000), ("10.0.0.2", 30000)], []),  # one that proxies alone reach
        ([("10.0.0.1", 30000), ("10.0.0.2", 8000)], []),
        ([PROXY], []),
        ([], []),
    ],
)
def test_replicas_of_this_machine_are_led_to(targets: list[tuple[str, int]], ports: list[int]) -> None:
    groups = [group(*targets), group(("10.0.0.3", 40000), protocol="gRPC")]
    assert on_loopback(groups, "ddm", PROXY) == [("127.0.0.1", port) for port in ports]


def test_beside_other_applications_the_proxy_knows_whose_a_request_is() -> None:
    both = [group(("10.0.0.1", 30000)), group(("10.0.0.1", 30001), name="other")]
    assert on_loopback(both, "ddm", PROXY) == [] != on_loopback(both[:1], "ddm", PROXY)
