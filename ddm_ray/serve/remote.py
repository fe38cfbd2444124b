"""Engines of other processes: their methods over Serve's handles, called again where a replica dies."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import torch
from ray import serve
from ray.exceptions import ObjectLostError, RayActorError
from ray.serve.exceptions import ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle
from torch import Tensor

from ddm_ray.core.condition import Condition, Text
from ddm_ray.errors import ServeError
from ddm_ray.sampling.driver import Field
from ddm_ray.sampling.packing import pack, unpack
from ddm_ray.sampling.request import Call, ExpertCall, MixtureInfo
from ddm_ray.sampling.state import Trajectories
from ddm_ray.serve.batch import Segment
from ddm_ray.serve.segments import AwayError

ATTEMPTS = 5
FIRST_WAIT_S = 0.1
STATUS_S = 0.5
PATIENCE_S = 1.0
"""Seconds without an answer after which it is asked whether anybody is there to give one."""
STARTING_S = 5.0
"""Seconds that a request waits for the first replica; then its client hears of it, and the replica starts on."""

GONE = (RayActorError, ObjectLostError, ReplicaUnavailableError)
"""Errors of a call whose replica or node died: the call carries its state, so another replica can repeat it."""

Arrays = tuple[np.ndarray | None, ...]


class Replicas:
    """Number of replicas of an application's deployments. `away`: those known to have none, looked at until they do."""

    def __init__(self, application: str):
        self.away = set[str]()
        self._application, self._asked_at = application, -np.inf
        self._deployments: dict[str, Any] = {}
        self._lock = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None

    async def lacking(self, deployment: str) -> bool:
        """True if none of this deployment's runs, and none is on its way because somebody asked."""
        overview = await self._overview(deployment)
        if overview.replica_states.get("RUNNING", 0) or overview.status == "UPSCALING":
            return False
        self.away.add(deployment)
        if self._watching is None or self._watching.done():
            self._watching = asyncio.ensure_future(self._watch())
        return True

    async def starting(self, deployment: str) -> bool:
        """True if the first one is on its way."""
        overview = await self._overview(deployment)
        return overview.status == "UPSCALING" and not overview.replica_states.get("RUNNING", 0)

    async def _overview(self, deployment: str) -> Any:
        async with self._lock:
            if time.monotonic() - self._asked_at > STATUS_S:
                applications = (await asyncio.to_thread(serve.status)).applications
                self._deployments = dict(applications[self._application].deployments)
                self._asked_at = time.monotonic()
        return self._deployments[deployment]

    async def _watch(self) -> None:
        while self.away:
            await asyncio.sleep(STATUS_S)
            for deployment in list(self.away):
                if not await self.lacking(deployment):
                    self.away.discard(deployment)


class RemoteEngine:
    """The engine of an expert's replicas."""

    def __init__(self, handle: DeploymentHandle[Any], expert: int, info: MixtureInfo, replicas: Replicas):
        self.expert, self._handle, self._info, self._replicas = expert, handle, info, replicas

    async def run(self, rows: Trajectories, seconds: float | None, until: int | None) -> Segment:
        """The segment that `BatchEngine.submit` promises. AwayError if the expert has no replica and expects none."""
        packed, needed_B = await self._call(self._handle.run, pack(rows), seconds, until)
        return Segment(unpack(packed, self._info), needed_B)

    async def velocity(self, call: ExpertCall) -> Tensor:
        """The answer to a call of this expert. AwayError as above."""
        arrays = to_arrays(call.condition)
        answer = await self._call(self._handle.velocity, call.x_BCHW.numpy(), call.t_B.numpy(), arrays)
        return torch.tensor(answer)

    @property
    def away(self) -> bool:
        """True if it is known that nobody answers."""
        return self._handle.deployment_name in self._replicas.away

    async def _call(self, method: DeploymentHandle[Any], *args: Any) -> Any:
        for attempt in range(ATTEMPTS - 1):
            try:
                return await self._answered(method.remote(*args))
            except GONE:
                await asyncio.sleep(FIRST_WAIT_S * 2**attempt)
        return await self._answered(method.remote(*args))

    async def _answered(self, response: Awaitable[Any]) -> Any:
        answer, name = asyncio.ensure_future(_awaited(response)), self._handle.deployment_name
        since = time.monotonic()
        try:
            while not (await asyncio.wait({answer}, timeout=PATIENCE_S))[0]:
                if await self._replicas.lacking(name):
                    raise AwayError(f"{name} has no replica", self.expert)
                if time.monotonic() - since > STARTING_S and await self._replicas.starting(name):
                    raise ServeError(f"{name} had been scaled to zero and is starting: ask again soon")
            return answer.result()
        finally:
            answer.cancel()


async def _awaited(response: Awaitable[Any]) -> Any:
    return await response


def answer_from(engines: Sequence[RemoteEngine], router: Field | None) -> Callable[[Sequence[Call]], list[Tensor]]:
    """Return what answers an engine's calls in its thread: the router here, experts by their replicas, all at once.

    Call it in the event loop of the handles.
    """
    loop = asyncio.get_running_loop()

    async def velocities(calls: Sequence[ExpertCall]) -> list[Tensor]:
        return await asyncio.gather(*(engines[call.expert].velocity(call) for call in calls))

    def answer(calls: Sequence[Call]) -> list[Tensor]:
        experts = [call for call in calls if isinstance(call, ExpertCall)]
        if experts:
            return asyncio.run_coroutine_threadsafe(velocities(experts), loop).result()
        assert router is not None
        return [router(call.x_BCHW, call.t_B, call.condition) for call in calls]

    return answer


def to_arrays(condition: Condition) -> Arrays:
    """A condition as arrays, which cross to another process without a copy."""
    if isinstance(condition, Text):
        pooled = condition.pooled_BP
        return condition.tokens_BLE.numpy(), condition.mask_BL.numpy(), None if pooled is None else pooled.numpy()
    return (condition.numpy(),)


def from_arrays(arrays: Arrays) -> Condition:
    """The condition that `to_arrays` made arrays of. They may be read-only views of shared memory: copied."""
    tensors = [None if array is None else torch.tensor(array) for array in arrays]
    if len(tensors) == 1:
        assert tensors[0] is not None
        return tensors[0]
    tokens_BLE, mask_BL, pooled_BP = tensors
    assert tokens_BLE is not None
    assert mask_BL is not None
    return Text(tokens_BLE, mask_BL, pooled_BP)
