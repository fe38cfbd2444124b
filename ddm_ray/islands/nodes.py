"""The machines of the Ray cluster that this process has joined, each looked at by an actor on it."""

import time
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ddm_ray.islands.probe import MOST_NODES, ClusterReport, NodeReport, look, places_of
from ddm_ray.placement import TrainPlacement
from ddm_ray.spelling import printable
from ddm_ray.train.ray.recovery import reason
from ddm_ray.train.ray.room import grows

NODE_SECONDS = 60.0
"""Longest time for a machine's answer: it starts a process for it."""
_STRANGERS_QUESTION = "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo"


class Scout:
    """An actor that tells of the machine it is on."""

    def look(self, *arguments: Any) -> NodeReport:
        """See `look`."""
        return look(*arguments)

    def clock(self) -> float:
        """Seconds since 1970 by this machine's clock."""
        return time.time()


@dataclass
class _Scouted:
    """A machine that is being looked at."""

    name: str
    places: int
    scout: Any
    report: Any

    def finish(self) -> NodeReport:
        """The report of it, with bounds of how far its clock is ahead of this machine's."""
        report: NodeReport = ray.get(self.report, timeout=NODE_SECONDS)
        asked = time.time()
        now = ray.get(self.scout.clock.remote(), timeout=NODE_SECONDS)
        return report.model_copy(update={"places": self.places, "ahead": (now - time.time(), now - asked)})


def look_at_cluster(run_url: str, check: str, placement: TrainPlacement) -> ClusterReport:
    """The report of the cluster that this process has joined, for trainings of this placement.

    Machines that have no room for a worker aren't looked at, unless none has any.
    """
    nodes = [node for node in ray.nodes() if node["Alive"]]
    places = [places_of(node["Resources"], placement.asked) for node in nodes]
    fitting = [pair for pair in zip(nodes, places, strict=True) if pair[1] or not any(places)][:MOST_NODES]
    arguments = (run_url, check, placement.cache, placement.use_gpu)
    scouted = [_send(node, number, arguments) for node, number in fitting]
    ray.wait([each.report for each in scouted], num_returns=len(scouted), timeout=NODE_SECONDS)
    reports, silent = [], []
    for each in scouted:
        try:
            if not ray.wait([each.report], timeout=0)[0]:
                raise TimeoutError(f"no answer within {NODE_SECONDS:.0f} s")
            reports.append(each.finish())
        except (ray.exceptions.RayError, TimeoutError) as error:
            silent.append(f"{each.name}: {printable(reason(error), 300)}")
        ray.kill(each.scout)
    return ClusterReport(
        resources={printable(name, 1000): amount for name, amount in list(ray.cluster_resources().items())[:1000]},
        places=sum(places),
        nodes=reports,
        silent=silent,
        grows=grows(nodes),
        open=answers_strangers(ray.get_runtime_context().gcs_address),
    )


def _send(node: dict[str, Any], places: int, arguments: tuple[Any, ...]) -> _Scouted:
    actor: Any = ray.remote(Scout)
    scout = actor.options(
        num_cpus=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        # It has none of the GPUs, and is to see all.
        runtime_env={"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}},
    ).remote()
    return _Scouted(printable(node["NodeManagerHostname"], 100), places, scout, scout.look.remote(*arguments))


def answers_strangers(address: str) -> bool | None:
    """True if the Ray at HOST:PORT tells of its machines who gives no token; None where that can't be asked."""
    try:
        import grpc
    except ModuleNotFoundError:
        return None
    with grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary(_STRANGERS_QUESTION)(b"", timeout=10)
        except grpc.RpcError as error:
            return False if error.code() is grpc.StatusCode.UNAUTHENTICATED else None
    return True
