"""The start of a server as it shows."""

from typing import Any

from ray.serve._private.common import ReplicaState
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, DeploymentStatusOverview

from ddm_ray.serve.cluster.start import replicas

RUNNING, STARTING = ReplicaState.RUNNING, ReplicaState.STARTING


def test_replicas_of_all_deployments_are_counted() -> None:
    states: list[dict[Any, int]] = [{RUNNING: 1}, {STARTING: 2, RUNNING: 1}, {}]
    parts = {
        str(number): DeploymentStatusOverview("UPDATING", "UNSPECIFIED", each, "") for number, each in enumerate(states)
    }
    overview = ApplicationStatusOverview(ApplicationStatus.DEPLOYING, "", 0.0, parts)
    assert replicas(overview) == (2, 4)
