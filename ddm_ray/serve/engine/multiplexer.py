"""Engines of many experts on one device, of which few have their weights there: one thread runs them all.

No Ray, no HTTP. Shapes: K experts. To fetch an expert's weights into a slot of another's is a swap.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ddm_ray.errors import DDMError, ServeError
from ddm_ray.sampling import driver
from ddm_ray.sampling.offload import OffloadedToHost
from ddm_ray.sampling.request import Call
from ddm_ray.serve.engine.batch import Pace
from ddm_ray.serve.engine.batch_engine import STOPS, BatchEngine
from ddm_ray.serve.engine.runner import ExpertError
from ddm_ray.serve.engine.scheduler import Scheduler, SharedDevice, Speed
from ddm_ray.spelling import one_line

LOG = logging.getLogger("ray.serve")
MIXING = -1
"""The engine that mixes experts within a step, among the numbers of experts."""


@dataclass(frozen=True)
class Decision:
    """A velocity of engine `run`, and before it a swap: expert `fetch` for `leaving` (None: a slot is free)."""

    run: int
    fetch: int | None = None
    leaving: int | None = None


class Slots(SharedDevice):
    """A cache of device slots for experts: the earliest deadline is first, but an expert that has come stays a while.

    An absent expert with work takes the slot of the least recently used expert without work. If all experts here have
    work, it displaces the one with the latest deadline, provided that its own deadline is earlier and that the time of
    two swaps has passed since the last displacement. So swaps take at most half of the time, and the most urgent engine
    waits for SWAPS swaps at most. The experts that are here compute while a swap is under way. The engine that mixes
    needs all slots: it displaces all experts, or is displaced.
    """

    def __init__(self, num_experts: int, num_slots: int):
        super().__init__()
        self._num_slots, self._all_fit, self._swap = num_slots, num_experts <= num_slots, Speed()
        self._settled, self._mixes = -math.inf, False

    def swapped(self, seconds: float) -> None:
        """Learn from one swap."""
        self._swap.ran(1, seconds)
        self.swap_s = self._swap.seconds(1)

    def next(self, deadlines: Mapping[int, float], here: Collection[int], coming: int | None, now: float) -> Decision:
        """Decide what to do now. `deadlines`: the earliest of each engine that has work, one at least.

        `here`: experts with their weights in a slot, the least recently used first. `coming`: the expert with its
        weights on their way.
        """
        if coming is not None and coming not in deadlines:
            here, coming = [*here, coming], None  # no job waits for it any more
        order = sorted(deadlines, key=lambda engine: (deadlines[engine], engine))
        settled, holding = now >= self._settled, [MIXING] if self._mixes else [*here, coming]
        mixes = order[0] == MIXING if settled or not any(each in deadlines for each in holding) else self._mixes
        if mixes is not self._mixes:
            self._displaced(now)
            self._mixes = mixes
        if mixes:
            return Decision(MIXING)
        fetch = leaving = None
        absent = next((each for each in order if each not in (*here, coming, MIXING)), None)
        if absent is not None and coming is None:
            if len(here) < self._num_slots:
                fetch = absent
            else:
                latest = max(here, key=lambda expert: deadlines.get(expert, math.inf))
                if latest not in deadlines:
                    fetch, leaving = absent, latest
                elif settled and deadlines[latest] > deadlines[absent]:
                    fetch, leaving = absent, latest
                    self._displaced(now)
        run = next((each for each in order if each in here and each != leaving), fetch if coming is None else coming)
        assert run is not None
        return Decision(run, fetch, leaving)

    def _displaced(self, now: float) -> None:
        """Displace no engine with work until this swap has ended, and for as long again."""
        if not self._all_fit:
            self._settled = now + 2 * self.swap_s


class Multiplexer:
    """An engine for each expert, `of_expert[k]`, and one that asks them all, `mixing`, in a thread that they share.

    `swaps_K` counts the fetches of each expert's weights, and `waited_K` the seconds for which computing waited for
    them. A fetch that fails ends those that need that expert, with ExpertError.
    """

    def __init__(
        self,
        experts: OffloadedToHost,
        router: driver.Field | None,
        max_rows: int = 32,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`max_rows` of a batch. `clock` gives seconds."""
        count = len(experts)
        self.slots = Slots(count, experts.resident)
        self.swaps_K, self.waited_K = np.zeros(count, np.int64), np.zeros(count)
        self._experts, self._clock = experts, clock
        experts.on_fetch = self._fetched
        self._changed, self._closed = threading.Condition(), False
        pace, named = Pace(), _NamedFailures(experts)

        def answer(calls: Sequence[Call]) -> list[Tensor]:
            return driver.answers(calls, named, router)

        def engine(here_K: np.ndarray | None) -> BatchEngine:
            scheduler = Scheduler(max_rows, device=self.slots)
            return BatchEngine(answer, here_K, scheduler, clock, self._changed, pace)

        self.of_expert = [engine(np.arange(count) == expert) for expert in range(count)]
        self.mixing = engine(None)
        self._engines = {**dict(enumerate(self.of_expert)), MIXING: self.mixing}
        for each in self.of_expert:
            # They are alike; so who is seldom asked knows its own.
            each.scheduler.speed = self.of_expert[0].scheduler.speed
        self._before: int | None = None
        self._thread = threading.Thread()

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

    def start(self) -> None:
        """Run in a thread until `close`."""
        self._thread = threading.Thread(target=self._run, name="multiplexer", daemon=True)
        self._thread.start()

    def close(self, seconds: float = 60.0) -> None:
        """Stop after the velocity that is on its way, waiting so long for it; whoever waits gets ServeError."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(seconds)
        for engine in self._engines.values():
            engine.close()
        self._experts.on_fetch = None  # else its memory would stay until the next full garbage collection

    def require_running(self) -> None:
        """Raise ServeError if the thread has stopped, or if nothing of one engine succeeds any more."""
        if not self._thread.is_alive():
            raise ServeError(STOPS)
        for engine in self._engines.values():
            engine.require_success()

    def tick(self) -> bool:
        """Run a velocity of the engine whose turn it is; False if nobody has work."""
        for engine in self._engines.values():
            engine.leave()
        deadlines = self._deadlines()
        if not deadlines:
            return False
        here = self._experts.here
        # The engine that mixes may have sent for several: they come one after the other.
        coming = next((expert for expert in reversed(here) if not self._experts.arrived(expert)), None)
        turn = self.slots.next(deadlines, [each for each in here if each != coming], coming, self._clock())
        if turn.fetch is not None:
            self._experts.prefetch(turn.fetch, turn.leaving)
        engine = self._engines[turn.run]
        if turn.fetch is not None or turn.run != self._before:
            engine.pause()
        self._before = turn.run
        engine.tick()
        self._experts.measure()
        return True

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    while not self._closed and not self._deadlines():
                        self._changed.wait()
                    if self._closed:
                        return
                self.tick()
        finally:
            self._closed = True
            for engine in self._engines.values():
                engine.close()

    def _deadlines(self) -> dict[int, float]:
        """The earliest of each engine that has work."""
        deadlines = ((number, engine.deadline) for number, engine in self._engines.items())
        return {number: deadline for number, deadline in deadlines if deadline is not None}

    def _fetched(self, expert: int, seconds: float, waited: float) -> None:
        self.slots.swapped(seconds)
        self.swaps_K[expert] += 1
        self.waited_K[expert] += waited


class _NamedFailures:
    """Experts of which one that can't be fetched raises ExpertError."""

    def __init__(self, experts: OffloadedToHost):
        self._experts, self.prefetch = experts, experts.prefetch

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
            LOG.warning("the weights of expert %d don't come: %s", expert, one_line(error, 500))
            raise ExpertError(f"the weights of expert {expert} don't come: {type(error).__name__}", expert) from error
