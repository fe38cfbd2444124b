"""Engines of other processes: their methods over Serve's handles, called again where a replica dies."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import torch
from ray import serve
from ray.exceptions import ObjectLostError, RayActorError, RayTaskError
from ray.serve.exceptions import ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle
from torch import Tensor

from ddm_ray.core.condition import Condition, Text
from ddm_ray.errors import CorruptArtifact, DDMError, DriftError, ServeError
from ddm_ray.sampling import driver
from ddm_ray.sampling.driver import Field
from ddm_ray.sampling.packing import pack, unpack
from ddm_ray.sampling.request import Call, ExpertCall, MixtureInfo
from ddm_ray.sampling.state import Trajectories
from ddm_ray.serve.batch import Segment
from ddm_ray.serve.engine import AwayError, StartingError
from ddm_ray.serve.versions import Pair

ATTEMPTS = 5
FIRST_WAIT_S = 0.1
STATUS_S = 0.5
AWAY_S = 10.0
VELOCITY_S = 30.0
PATIENCE_S = 1.0
"""Seconds without an answer after which it is asked whether anybody is there to give one."""
STARTING_S = 5.0
"""Seconds that a request waits for the first replica; then its client hears of it, and the replica starts on."""

GONE = (RayActorError, ObjectLostError, ReplicaUnavailableError)
"""Errors of a call whose replica or node died: the call carries its state, so another replica can repeat it."""

Arrays = tuple[np.ndarray | None, ...]


class Replicas:
    """Numbers of replicas of an application's deployments, asked for at most once in STATUS_S."""

    def __init__(self, application: str):
        self._application, self._asked_at = application, -np.inf
        self._deployments: dict[str, Any] = {}
        self._lock = asyncio.Lock()
        self._away_since: dict[str, float] = {}
        self._watching: asyncio.Task[None] | None = None

    async def lacking(self, deployment: str) -> bool:
        """True if none of this deployment's runs, though one should: it neither sleeps nor is being woken."""
        overview = await self._overview(deployment)
        return not overview.replica_states.get("RUNNING", 0) and overview.status not in ("HEALTHY", "UPSCALING")

    async def running(self, deployment: str) -> bool:
        """True if one is known to run."""
        try:
            return bool((await self._overview(deployment)).replica_states.get("RUNNING", 0))
        except Exception:  # the controller may be away
            return False

    async def starting(self, deployment: str) -> bool:
        """True if the first one is on its way."""
        overview = await self._overview(deployment)
        return overview.status == "UPSCALING" and not overview.replica_states.get("RUNNING", 0)

    def mark_away(self, deployment: str) -> None:
        """Note that nobody answered there; for AWAY_S, or until one runs again, nobody need ask."""
        self._away_since[deployment] = time.monotonic()
        if self._watching is None or self._watching.done():
            self._watching = asyncio.ensure_future(self._watch())

    def is_away(self, deployment: str) -> bool:
        """True if nobody answered there, not long ago."""
        since = self._away_since.get(deployment)
        return since is not None and time.monotonic() - since < AWAY_S

    async def _watch(self) -> None:
        while self._away_since:
            await asyncio.sleep(STATUS_S)
            for deployment in list(self._away_since):
                if not self.is_away(deployment) or not await self._still_lacking(deployment):
                    del self._away_since[deployment]

    async def _still_lacking(self, deployment: str) -> bool:
        try:
            return await self.lacking(deployment)
        except Exception:  # the controller may be away, too: AWAY_S ends it then
            return True

    async def _overview(self, deployment: str) -> Any:
        async with self._lock:
            if time.monotonic() - self._asked_at > STATUS_S:
                applications = (await asyncio.to_thread(serve.status)).applications
                self._deployments = dict(applications[self._application].deployments)
                self._asked_at = time.monotonic()
        return self._deployments[deployment]


class RemoteEngine:
    """The engine of an expert's replicas, by these weights of the expert and of the router."""

    def __init__(
        self, handle: DeploymentHandle[Any], expert: int, info: MixtureInfo, replicas: Replicas, weights: Pair
    ):
        self.expert, self._handle, self._info, self._replicas = expert, handle, info, replicas
        self._name, self._weights = handle.deployment_name, weights

    async def run(self, rows: Trajectories, seconds: float | None, until: int | None) -> Segment:
        """The segment that `BatchEngine.submit` promises. AwayError if the expert has no replica and expects none.

        StartingError if its first one is on its way for some seconds.
        """
        packed, needed_B, waited_s = await self._called(self._handle.run, pack(rows), seconds, until)
        return Segment(unpack(packed, self._info), needed_B, waited_s)

    async def velocity(self, call: ExpertCall) -> Tensor:
        """The answer to a call of this expert. Raises as above, and AwayError after VELOCITY_S without one."""
        arrays = (call.x_BCHW.numpy(), call.t_B.numpy(), to_arrays(call.condition))
        try:
            async with asyncio.timeout(VELOCITY_S):
                return torch.tensor(await self._called(self._handle.velocity, *arrays))
        except TimeoutError:
            self._replicas.mark_away(self._name)
            raise AwayError(f"{self._name} doesn't answer", self.expert) from None

    async def _called(self, method: Any, *arguments: Any) -> Any:
        try:
            return await called(method, self._require_replica, *arguments, self._weights)
        except (CorruptArtifact, DriftError) as error:
            raise AwayError(f"{self._name} can't load its weights: {error}", self.expert) from None

    @property
    def away(self) -> bool:
        """True if it is known that nobody answers."""
        return self._replicas.is_away(self._name)

    async def _require_replica(self, waited_s: float) -> None:
        try:
            lacking, starting = await self._replicas.lacking(self._name), await self._replicas.starting(self._name)
        except Exception:  # it may be the controller that is away, not the expert
            return
        if lacking:
            self._replicas.mark_away(self._name)
            raise AwayError(f"{self._name} has no replica", self.expert)
        if starting and waited_s > STARTING_S:
            raise StartingError(f"{self._name} had been scaled to zero and is starting: ask again soon", self.expert)


async def called(
    method: Any, require_replica: Callable[[float], Awaitable[None]] | None = None, *arguments: Any
) -> Any:
    """The answer of a deployment's method; if a replica dies, another is called, or the next to start.

    `require_replica` may raise after so many seconds without an answer. Raises what the method raised, if it is an
    error of ours, and ServeError if replicas die again and again.
    """
    for attempt in range(ATTEMPTS):
        try:
            return await _answered(method.remote(*arguments), require_replica)
        except GONE:
            await asyncio.sleep(FIRST_WAIT_S * 2**attempt)
        except RayTaskError as error:
            # Its own text is the traceback of another process.
            raise error.cause if isinstance(error.cause, DDMError) else error from None
    raise ServeError("a replica died, and the next ones as well: ask again soon")


async def _answered(response: Any, require_replica: Callable[[float], Awaitable[None]] | None) -> Any:
    answer, since = asyncio.ensure_future(_awaited(response)), time.monotonic()
    try:
        while not (await asyncio.wait({answer}, timeout=PATIENCE_S))[0]:
            if require_replica is not None:
                await require_replica(time.monotonic() - since)
        return answer.result()
    finally:
        if not answer.done():
            answer.cancel()
            response.cancel()  # else it goes on there, though nobody waits


async def _awaited(response: Any) -> Any:
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
        return driver.answers(calls, (), router)

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
