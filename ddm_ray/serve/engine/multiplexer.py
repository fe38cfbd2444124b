"""Engines of many experts on one device, which has slots for the weights of a few. One thread runs them all.

No Ray, no HTTP. Shapes: K experts.
"""

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from ddm_ray.errors import DDMError
from ddm_ray.sampling import driver
from ddm_ray.sampling.offload import OffloadedToHost
from ddm_ray.sampling.packed_weights import PackedWeights
from ddm_ray.sampling.request import NetworkCall
from ddm_ray.serve.engine.batch import Pace
from ddm_ray.serve.engine.batch_engine import BatchEngine
from ddm_ray.serve.engine.engine_thread import EngineThread
from ddm_ray.serve.engine.runner import ExpertError
from ddm_ray.serve.engine.scheduler import MAX_ROWS, Scheduler, Speed
from ddm_ray.serve.engine.swap_scheduler import MIXING, SwapScheduler
from ddm_ray.spelling import one_line

LOG = logging.getLogger("ray.serve")


class Multiplexer(EngineThread):
    """An engine for each expert, `of_expert[k]`, and one that asks them all, `mixing`, in a thread that they share.

    `swaps_K` counts the fetches of each expert's weights, and `waited_K` the seconds for which computing waited for
    them. If a fetch fails, the rows that need that expert end with ExpertError.
    """

    def __init__(
        self,
        experts: OffloadedToHost,
        router: driver.Field | None,
        max_rows: int = MAX_ROWS,
        clock: Callable[[], float] = time.monotonic,
        clusters: Sequence[int] = (),
        cost_K: np.ndarray | None = None,
    ):
        """`max_rows` of a batch. `clock` gives seconds. `clusters`: the experts' numbers; none: 0 to K - 1.

        `cost_K`: see `BatchEngine`.
        """
        super().__init__()
        count = len(experts)
        self.clusters = clusters or range(count)
        self.slots = SwapScheduler(count, experts.resident)
        self.swaps_K, self.waited_K = np.zeros(count, np.int64), np.zeros(count)
        self._experts, self._clock = experts, clock
        experts.on_fetch = self._fetched
        pace, named = Pace(), _NamedFailures(experts, self.clusters)

        def answer(calls: Sequence[NetworkCall]) -> list[Tensor]:
            return driver.answers(calls, named, router)

        def engine(here_K: np.ndarray | None, cost_K: np.ndarray | None = None) -> BatchEngine:
            scheduler = Scheduler(max_rows, device=self.slots)
            return BatchEngine(answer, here_K, scheduler, clock, self._changed, pace, cost_K)

        self.of_expert = [engine(np.arange(count) == expert) for expert in range(count)]
        self.mixing = engine(None, cost_K)
        self._engines = {**dict(enumerate(self.of_expert)), MIXING: self.mixing}
        self._number = {engine.scheduler: number for number, engine in self._engines.items()}
        speed_of = dict[PackedWeights | None, Speed]()
        for expert, each in enumerate(self.of_expert):
            # Many experts are alike: an engine with few requests knows its speed from those of its form.
            each.scheduler.speed = speed_of.setdefault(experts.form_of(expert), each.scheduler.speed)
        self._before: int | None = None

    @property
    def batch_rows(self) -> int:
        """Rows of all batches."""
        return sum(engine.batch_rows for engine in self._engines.values())

    @property
    def waiting_rows(self) -> int:
        """Rows that wait for a place in one."""
        return sum(engine.waiting_rows for engine in self._engines.values())

    @property
    def num_velocities(self) -> int:
        """Velocities that batches have had."""
        return sum(engine.num_velocities for engine in self._engines.values())

    def require_success(self) -> None:
        """Raise ServeError if nothing of one engine succeeds any more."""
        for engine in self._engines.values():
            engine.require_success()

    def tick(self) -> bool:
        """Run a velocity of the engine that the swap scheduler chooses; False if no engine has work."""
        for number in self._deadlines():
            self._engines[number].leave()
        deadlines = self._deadlines()
        if not deadlines:
            return False
        here = self._experts.here
        # The engine that mixes may fetch several: they come one after the other.
        coming = next((expert for expert in reversed(here) if not self._experts.arrived(expert)), None)
        decision = self.slots.next(deadlines, [each for each in here if each != coming], coming, self._clock())
        if decision.fetch is not None:
            self._experts.prefetch(decision.fetch, decision.leaving)
        engine = self._engines[decision.run]
        if decision.fetch is not None or decision.run != self._before:
            engine.pause()
        self._before = decision.run
        engine.tick()
        self._experts.measure()
        return True

    def _has_work(self) -> bool:
        return bool(self._deadlines())

    def _end_all(self) -> None:
        for engine in self._engines.values():
            engine.close()
        self._experts.on_fetch = None  # else its memory would stay until the next full garbage collection

    def _deadlines(self) -> dict[int, float]:
        """The earliest of each engine that has work; the others, which may be hundreds, aren't looked at."""
        with self._changed:
            latest_first = reversed(self.slots.jobs)
            return {self._number[scheduler]: job.deadline for scheduler, job in latest_first}

    def _fetched(self, expert: int, seconds: float, waited: float) -> None:
        self.slots.swapped(seconds)
        self.swaps_K[expert] += 1
        self.waited_K[expert] += waited


class _NamedFailures:
    """The experts; one that can't be fetched raises ExpertError."""

    def __init__(self, experts: OffloadedToHost, clusters: Sequence[int]):
        self._experts, self._clusters, self.prefetch = experts, clusters, experts.prefetch

    def __len__(self) -> int:
        return len(self._experts)

    @property
    def here(self) -> list[int]:
        return self._experts.here

    def __getitem__(self, expert: int) -> driver.Field | None:
        try:
            return self._experts[expert]
        except DDMError:
            raise
        except Exception as error:
            number = self._clusters[expert]
            LOG.warning("the weights of expert %d don't come: %s", number, one_line(error, 500))
            raise ExpertError(f"the weights of expert {number} don't come: {type(error).__name__}", expert) from error
