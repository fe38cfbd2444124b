"""Images of a request by segments: rows go on in the engine that has their expert, and change engines when they switch.

No Ray, no HTTP. Shapes: B rows, K experts.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ddm_ray.core.mixture import available_prior
from ddm_ray.sampling.request import MixtureInfo, SampleRequest, SampleResult
from ddm_ray.sampling.state import Trajectories
from ddm_ray.sampling.trajectory import start_as_noise
from ddm_ray.serve.engine.runner import AwayError, Runner, Segment


@dataclass(frozen=True)
class Sampled:
    """The images of a request, and the positions of experts that were left out of it because they are away.

    `cut`: how many tokens of the prompt are kept, and of how many; None: all are.
    """

    result: SampleResult
    away: frozenset[int]
    cut: tuple[int, int] | None = None

    @property
    def away_numbers(self) -> list[int]:
        """The numbers of the experts that were left out."""
        return [self.result.clusters[expert] for expert in sorted(self.away)]


OnSegment = Callable[[int, int, int, float | None], None]
"""Called after each segment with the number of the engine's expert (-1: all), its velocities, how many rows then
switched, and for the first ones of a request the seconds before them."""
OnStop = Callable[[SampleResult], Awaitable[None]]
"""Called with the result as it would be if nothing changed from here on, and the routing of the steps so far."""


class SegmentSampler:
    """Samples a mixture by its runners: `of_expert[k]` has expert k and a router, `mixing` asks all.

    Experts that are None have no weights yet. They count as away, like those that don't answer.
    """

    def __init__(
        self,
        info: MixtureInfo,
        of_expert: Sequence[Runner | None],
        mixing: Runner,
        on_segment: OnSegment | None = None,
        device: str = "cpu",
    ):
        """`device`: where rows begin, which is that of engines in this process."""
        self.info, self._on_segment, self._device = info, on_segment, device
        self._of_expert, self._mixing = of_expert, mixing

    async def sample(
        self,
        request: SampleRequest,
        seconds: float | None = None,
        stops: Sequence[int] = (),
        on_stop: OnStop | None = None,
    ) -> Sampled:
        """The request's images, as `Models.sample` gives them; without experts that are away, if any of the others is.

        `on_stop` is called after as many velocities as each of `stops` says, in ascending order. SamplingError for
        what can't be met, AwayError where no expert is left; else as `BatchEngine.submit` raises.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        # `gone` are experts without weights, and those that this request has met without a replica. `away` also has
        # those of which another request has learnt that: they may be back.
        gone = frozenset(expert for expert, runner in enumerate(self._of_expert) if runner is None)
        away = gone | {expert for expert, runner in enumerate(self._of_expert) if runner is not None and runner.away}
        num_seen = 0
        while True:
            if len(gone) == self.info.num_experts:
                raise AwayError("no expert has a replica", 0)
            if len(away) == self.info.num_experts:
                away = gone
            with torch.inference_mode():
                rows, journey = (
                    start_as_noise(request, self._info_without(away), self._device),
                    _Journey(self, deadline),
                )
            try:
                for number, stop in enumerate(stops):
                    rows = await journey.until(rows, stop)
                    if on_stop is not None and number >= num_seen:
                        await on_stop(rows.foreseen())
                        num_seen = number + 1
                rows = await journey.until(rows, None)
                assert rows.done_B.all()
                result = rows.result()
            except AwayError as error:
                if error.expert in away:
                    raise  # the router itself asks for one that this request left out
                # From the beginning: so the image is the one that the remaining experts always make from this seed.
                gone, away = gone | {error.expert}, away | {error.expert}
            else:
                return Sampled(result, away)

    def engine_of(self, rows: Trajectories, expert: int) -> Runner:
        """The runner that goes on with rows of one plan."""
        # A strategy that may use several experts within a velocity needs them all in one engine.
        if rows.plans[0].rule.most_experts > 1:
            return self._mixing
        runner = self._of_expert[expert]
        assert runner is not None
        return runner

    def count(self, engine: Runner, expert: int, begun_at: int, segment: Segment) -> None:
        """Report a segment that began after so many velocities."""
        if self._on_segment is not None:
            velocities, switched = int(segment.rows.position_B[0]) - begun_at, int((segment.needed_B >= 0).sum())
            waited_s = None if begun_at else segment.waited_s
            number = -1 if engine is self._mixing else self.info.clusters[expert]
            self._on_segment(number, velocities, switched, waited_s)

    def _info_without(self, away: frozenset[int]) -> MixtureInfo:
        if not away:
            return self.info
        here_K = torch.tensor([expert not in away for expert in range(self.info.num_experts)])
        return self.info.with_available(here_K if self.info.available_K is None else here_K & self.info.available_K)


_Parts = list[tuple[Trajectories, np.ndarray]]


class _Journey:
    """One way of a request's rows from noise to images."""

    def __init__(self, sampler: SegmentSampler, deadline: float | None):
        self._sampler, self._deadline = sampler, deadline

    async def until(self, rows: Trajectories, stop: int | None) -> Trajectories:
        """The rows after so many velocities, or at their end."""
        parts = await self._apart(rows, np.arange(len(rows)), first_expert_B(rows), stop)
        if len(parts) == 1:
            return parts[0][0]
        together = Trajectories.joined([part for part, _ in parts])
        return together.rows(np.concatenate([number_B for _, number_B in parts]).argsort())

    async def _apart(self, rows: Trajectories, number_B: np.ndarray, expert_B: np.ndarray, stop: int | None) -> _Parts:
        """Rows and their numbers in the request, each with its expert, at the same time."""
        experts = np.unique(expert_B)
        if len({id(self._sampler.engine_of(rows, int(expert))) for expert in experts}) == 1:
            return await self._segments(rows, number_B, int(expert_B[0]), stop)
        ways = []
        for expert in experts:
            own = np.flatnonzero(expert_B == expert)
            ways.append(asyncio.ensure_future(self._segments(rows.rows(own), number_B[own], int(expert), stop)))
        try:
            return [part for parts in await asyncio.gather(*ways) for part in parts]
        finally:
            for way in ways:  # if one has failed, the others are of no use
                way.cancel()

    async def _segments(self, rows: Trajectories, number_B: np.ndarray, expert: int, stop: int | None) -> _Parts:
        """The same rows on their way through engines, for as long as they all need the same one."""
        while True:
            seconds = None if self._deadline is None else self._deadline - time.monotonic()
            engine = self._sampler.engine_of(rows, expert)
            segment = await engine.run(rows, seconds, stop)
            self._sampler.count(engine, expert, int(rows.position_B[0]), segment)
            rows = segment.rows
            if (segment.needed_B < 0).all():
                return [(rows, number_B)]
            expert_B = np.where(segment.needed_B < 0, expert, segment.needed_B)
            if len(np.unique(expert_B)) > 1:
                return await self._apart(rows, number_B, expert_B, stop)
            expert = int(expert_B[0])


def first_expert_B(rows: Trajectories) -> np.ndarray:
    """Int64 (B,): the expert that each row holds, or that it most likely will by its condition alone."""
    expert_B = rows.weights_BK.argmax(dim=1).numpy()
    unknown_B = rows.weights_BK.numpy().sum(axis=1) == 0
    if not unknown_B.any():
        return expert_B
    info, available_K = rows.info, rows.plans[0].rule.available_K
    if info.prior_CK is None:
        here_K = np.ones(info.num_experts, bool) if available_K is None else available_K.numpy()
        return np.where(unknown_B, here_K.argmax(), expert_B)
    likeliest_C = available_prior(info.prior_CK, available_K).argmax(dim=1)
    condition = rows.condition
    likeliest_B = likeliest_C[condition.cpu() if isinstance(condition, Tensor) else torch.full((len(rows),), -1)]
    return np.where(unknown_B, likeliest_B.numpy(), expert_B)
