"""What is concluded from each state that Serve gives a replica, and who waits while its controller is away. No Ray."""

import asyncio
import threading
from collections.abc import Iterator
from itertools import product

import pytest
from ray.serve._private.common import DeploymentStatus, DeploymentStatusTrigger, ReplicaState
from ray.serve.schema import (
    ApplicationStatus,
    ApplicationStatusOverview,
    DeploymentStatusOverview,
    ServeStatus,
)

from ddm_ray.serve.cluster import remote_runner, replicas
from ddm_ray.serve.cluster.replicas import Replicas, is_alive, is_lacking, is_starting

PATIENCE_S = 30.0
CAN_ANSWER = {
    "STARTING": False,  # its weights aren't loaded
    "UPDATING": True,  # it takes new settings, with the same weights
    "RECOVERING": True,  # the controller was started again, and hasn't looked at it
    "RUNNING": True,
    "STOPPING": False,  # it is let finish, and given nothing more
    "STOPPED": False,
    "PENDING_MIGRATION": True,  # its node is to be drained once another one runs elsewhere
}
NEEDS_NONE = {
    "UPDATING": False,
    "HEALTHY": True,  # it was scaled to zero
    "UNHEALTHY": False,  # it died
    "DEPLOY_FAILED": False,
    "UPSCALING": True,  # it is being woken
    "DOWNSCALING": True,  # it is being put to sleep, and a request wakes it
}


def overview(status: str, **states: int) -> DeploymentStatusOverview:
    counts = {ReplicaState(name): count for name, count in states.items()}
    trigger = DeploymentStatusTrigger.UNSPECIFIED
    return DeploymentStatusOverview(DeploymentStatus(status), trigger, counts, "")


def test_the_tables_have_all_of_serves_states() -> None:
    assert CAN_ANSWER.keys() == {state.value for state in ReplicaState}
    assert NEEDS_NONE.keys() == {status.value for status in DeploymentStatus}


@pytest.mark.parametrize(("state", "status"), product(CAN_ANSWER, NEEDS_NONE))
def test_an_expert_is_left_out_only_where_no_replica_can_answer_and_one_should(state: str, status: str) -> None:
    one = overview(status, **{state: 1})
    assert is_alive(one) is CAN_ANSWER[state]
    assert is_lacking(one) is not (CAN_ANSWER[state] or NEEDS_NONE[status])
    assert is_starting(one) is (status == "UPSCALING" and not CAN_ANSWER[state])


def test_a_deployment_that_an_update_removed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of it would wait until Serve ends the ingress. While the application is built, Serve lists none."""
    parts = dict[str, DeploymentStatusOverview]()
    application = ApplicationStatusOverview(ApplicationStatus.DEPLOYING, "", 0.0, parts)
    monkeypatch.setattr(replicas.serve, "status", lambda: ServeStatus({}, {"ddm": application}))
    with pytest.raises(KeyError):
        asyncio.run(Replicas("ddm").lacking("expert-001"))
    parts["api"] = overview("UPDATING", RUNNING=1)
    assert asyncio.run(Replicas("ddm").lacking("expert-001")) and not asyncio.run(Replicas("ddm").lacking("api"))


@pytest.mark.parametrize("status", NEEDS_NONE)
def test_without_any_replica_it_sleeps_unless_it_failed(status: str) -> None:
    """Also where a controller has just begun, which so far knows of no replica and calls it UPDATING."""
    assert is_lacking(overview(status)) is (status in ("UNHEALTHY", "DEPLOY_FAILED"))


class Controller:
    """In place of `serve.status`: says this, once it is back. Threads that wait for it are counted."""

    def __init__(self) -> None:
        self.is_back, self.num_asked = threading.Event(), 0
        self.says = overview("HEALTHY", RUNNING=1)

    def status(self) -> ServeStatus:
        self.num_asked += 1
        assert self.is_back.wait(PATIENCE_S)
        application = ApplicationStatusOverview(ApplicationStatus.RUNNING, "", 0.0, {"expert": self.says})
        return ServeStatus({}, {"ddm": application})


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> Iterator[Controller]:
    controller = Controller()
    monkeypatch.setattr(replicas.serve, "status", controller.status)
    yield controller
    controller.is_back.set()


class Response:
    """In place of a response of a handle's."""

    def __init__(self, answer: "asyncio.Future[str]"):
        self._answer = answer

    def __await__(self) -> Iterator[str]:
        return self._answer.__await__()

    def cancel(self) -> None:
        self._answer.cancel()


def test_an_answer_does_not_wait_for_the_controller(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_runner, "CHECK_AFTER_S", 0.0)
    known = Replicas("ddm")

    async def asked() -> str:
        answer = asyncio.get_running_loop().create_future()

        async def require_replica(waited_s: float) -> None:
            answer.get_loop().call_later(0.01, answer.set_result, "an image")  # it comes while that is asked
            await known.lacking("expert")

        try:
            return await asyncio.wait_for(remote_runner._answered(Response(answer), require_replica), PATIENCE_S / 2)
        finally:
            controller.is_back.set()  # the loop doesn't end before the thread that waits for it

    assert asyncio.run(asked()) == "an image"
    assert controller.num_asked == 1


def test_it_is_asked_once_at_a_time_for_all_who_want_to_know(controller: Controller) -> None:
    known = Replicas("ddm")

    async def asked() -> list[bool]:
        first = [asyncio.ensure_future(known.lacking("expert")) for _ in range(5)]
        while not controller.num_asked:
            await asyncio.sleep(0.001)
        first[0].cancel()
        later = [asyncio.ensure_future(known.lacking("expert")) for _ in range(5)]
        await asyncio.sleep(0)
        controller.is_back.set()
        return await asyncio.gather(*first[1:], *later)

    assert asyncio.run(asked()) == [False] * 9
    assert controller.num_asked == 1
