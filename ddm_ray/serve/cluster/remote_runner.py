"""The Runner of an expert in other processes: calls of its replicas over Serve's handles, repeated if one dies."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from ray.exceptions import ObjectLostError, RayActorError, RayTaskError
from ray.serve.exceptions import ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle
from torch import Tensor

from ddm_ray.errors import CorruptArtifact, DDMError, DriftError, ServeError
from ddm_ray.sampling import driver
from ddm_ray.sampling.driver import Field
from ddm_ray.sampling.request import ExpertCall, MixtureInfo, NetworkCall
from ddm_ray.sampling.serialization import pack, pack_call, unpack, unpack_velocity
from ddm_ray.sampling.state import Trajectories
from ddm_ray.serve.cluster.replicas import Replicas, is_lacking, is_starting
from ddm_ray.serve.cluster.velocities import VelocityClient
from ddm_ray.serve.engine.runner import AwayError, Segment, StartingError
from ddm_ray.serve.engine.versions import Pair

LOG = logging.getLogger("ray.serve")

ATTEMPTS = 5
FIRST_WAIT_S = 0.1
VELOCITY_S, LINK_S = 30.0, 10.0
"""Seconds for a velocity through Serve, and for one over a link before that."""
CHECK_AFTER_S = 1.0
"""Seconds without an answer between two checks whether the expert has a replica."""
STARTING_S = 5.0
"""Seconds that a request waits for the first replica; then its client gets an error, while the replica starts on."""

GONE = (RayActorError, ObjectLostError, ReplicaUnavailableError)
"""Errors of a call if a replica or node died: the call carries its state, so another replica can repeat it."""


OnCalls = Callable[[int, int], None]
"""Called with the numbers of velocities that came over links and through Serve."""


class RemoteRunner:
    """The Runner of an expert's replicas, with these weights of the expert and of the router."""

    def __init__(
        self, handle: DeploymentHandle[Any], expert: int, info: MixtureInfo, replicas: Replicas, weights: Pair
    ):
        self.expert, self._handle, self._info, self._replicas = expert, handle, info, replicas
        self._name, self._weights = handle.deployment_name, weights
        linked = handle.options(method_name="link", stream=True)
        self._link = VelocityClient(self._name, partial(linked.remote, weights))

    async def run(self, rows: Trajectories, seconds: float | None, until: int | None) -> Segment:
        """See `Runner.run`. AwayError if the expert has no replica now, and isn't scaled to zero.

        StartingError if its first replica has been starting for STARTING_S.
        """
        packed, needed_B, waited_s = await self._call(self._handle.run, pack(rows), seconds, until)
        return Segment(unpack(packed, self._info), needed_B, waited_s)

    async def velocity(self, call: ExpertCall) -> Tensor:
        """The answer to a call of this expert. Raises as `run`, and AwayError after VELOCITY_S without an answer."""
        try:
            async with asyncio.timeout(VELOCITY_S):
                return unpack_velocity(await self._call(self._handle.velocity, pack_call(call)))
        except TimeoutError:
            self._replicas.mark_away(self._name)
            raise AwayError(f"{self._name} doesn't answer", self.expert) from None

    def ask(self, call: ExpertCall) -> bool:
        """Send a call over the link; False if there is no link now. For one thread other than the event loop's."""
        return self._link.ask(pack_call(call))

    def answer(self, until: float) -> Tensor | None:
        """The velocity of the last call; None if none came over the link: a call through Serve shows the reason.

        `until` is a time of the monotonic clock.
        """
        return self._link.answer(until)

    async def _call(self, method: Any, *arguments: Any) -> Any:
        try:
            answer = await call_deployment(method, self._require_replica, *arguments, self._weights)
            self._replicas.mark(self._name, able=True)
            return answer
        except (CorruptArtifact, DriftError) as error:
            self._replicas.mark(self._name, able=False)
            LOG.warning("%s can't load its weights: %s", self._name, error)
            raise AwayError(f"{self._name} can't load its weights", self.expert) from None

    @property
    def away(self) -> bool:
        """True if it is known that no replica answers."""
        return self._replicas.is_away(self._name)

    async def _require_replica(self, waited_s: float) -> None:
        try:
            overview = await self._replicas.overview(self._name)
        except Exception:  # perhaps the controller is away, not the expert
            return
        if is_lacking(overview):
            self._replicas.mark_away(self._name)
            raise AwayError(f"{self._name} has no replica", self.expert)
        if is_starting(overview) and waited_s > STARTING_S:
            raise StartingError(f"{self._name} had been scaled to zero and is starting: ask again soon", self.expert)


async def call_deployment(
    method: Any, require_replica: Callable[[float], Awaitable[None]] | None = None, *arguments: Any
) -> Any:
    """The answer of a deployment's method; if a replica dies, another one is called, or the next to start.

    `require_replica` is called with the seconds without an answer so far, and may raise. Raises the method's own
    DDMError, and ServeError if replicas die again and again.
    """
    for attempt in range(ATTEMPTS):
        try:
            return await _answered(method.remote(*arguments), require_replica)
        except GONE:
            await asyncio.sleep(FIRST_WAIT_S * 2**attempt)
        except RayTaskError as error:
            # The text of Ray's error is the traceback of another process.
            raise error.cause if isinstance(error.cause, DDMError) else error from None
    raise ServeError("a replica died, and the next ones as well: ask again soon")


async def _answered(response: Any, require_replica: Callable[[float], Awaitable[None]] | None) -> Any:
    answer, since = asyncio.ensure_future(_awaited(response)), time.monotonic()
    try:
        while not (await asyncio.wait({answer}, timeout=CHECK_AFTER_S))[0]:
            if require_replica is not None:
                await _unless_done(answer, require_replica(time.monotonic() - since))
        return answer.result()
    finally:
        if not answer.done():
            answer.cancel()
            response.cancel()  # else the replica goes on for a caller that has left


async def _awaited(response: Any) -> Any:
    return await response


async def _unless_done(answer: "asyncio.Future[Any]", check: Awaitable[None]) -> None:
    """Wait for a check and raise its error, unless the answer comes first."""
    checking = asyncio.ensure_future(check)
    try:
        await asyncio.wait({answer, checking}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        checking.cancel()
    error = checking.exception() if checking.done() else None
    if error is not None and not answer.done():
        raise error


def answer_from(
    runners: Sequence[RemoteRunner | None], router: Field | None, on_calls: OnCalls
) -> Callable[[Sequence[NetworkCall]], list[Tensor]]:
    """An Answer for an engine: the router's here, the experts' from their replicas, all at once.

    The engine calls it in its thread. Call this function in the event loop of the handles.
    """
    loop = asyncio.get_running_loop()

    def runner_of(call: ExpertCall) -> RemoteRunner:
        runner = runners[call.expert]
        assert runner is not None  # a plan never chooses an expert without weights
        return runner

    async def through_serve(calls: Sequence[ExpertCall]) -> list[Tensor]:
        return await asyncio.gather(*(runner_of(call).velocity(call) for call in calls))

    def answer(calls: Sequence[NetworkCall]) -> list[Tensor]:
        experts = [call for call in calls if isinstance(call, ExpertCall)]
        if not experts:
            return driver.answers(calls, (), router)
        until = time.monotonic() + LINK_S
        asked = [runner_of(call).ask(call) for call in experts]
        pairs = zip(experts, asked, strict=True)
        answers = [runner_of(call).answer(until) if is_asked else None for call, is_asked in pairs]
        rest = [call for call, answer in zip(experts, answers, strict=True) if answer is None]
        on_calls(len(experts) - len(rest), len(rest))
        others = asyncio.run_coroutine_threadsafe(through_serve(rest), loop).result() if rest else []
        late = iter(others)
        return [next(late) if answer is None else answer for answer in answers]

    return answer
