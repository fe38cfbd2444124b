"""The interface of engines to the processes that place them: a Runner takes a request's rows through one segment.

`LocalRunner` is of an engine in this process: the one engine of all experts (placement colocated), or one of the
engines that share a device (multiplexed). `RemoteRunner`, in `cluster`, calls replicas of one expert (per-expert).
No Ray, no HTTP. Shapes: B rows, K experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ddm_ray.errors import ServeError
from ddm_ray.sampling.state import Trajectories
from ddm_ray.serve.engine.engine_thread import EngineThread


class DeadlineError(ServeError):
    """A request's time is over before its images are done."""


class ExpertError(ServeError):
    """An expert doesn't answer, which concerns only the rows that need it. `expert`: its number."""

    def __init__(self, message: str, expert: int):
        super().__init__(message)
        self.expert = expert

    def __reduce__(self) -> tuple[type["ExpertError"], tuple[str, int]]:
        return type(self), (self.message, self.expert)


class AwayError(ExpertError):
    """An expert should have a replica, and has none that could answer now: the one after a death may be starting."""


class StartingError(ExpertError):
    """An expert's first replica is on its way."""


@dataclass(frozen=True)
class Segment:
    """Rows at the end of a segment, and the expert (int64, -1: none) that each needs next which isn't here.

    `waited_s`: seconds before its first velocity.
    """

    rows: Trajectories
    needed_B: np.ndarray
    waited_s: float = 0.0


class Runner(Protocol):
    """An engine with one expert or more, in this process or in others. Many requests call it at the same time."""

    @property
    def away(self) -> bool:
        """True if it is known that no process answers. Requests then leave its expert out."""

    async def run(self, rows: Trajectories, seconds: float | None, until: int | None) -> Segment:
        """Take rows through a segment.

        It ends when all rows are done, when they have had `until` velocities (None: no such stop), or when a row needs
        an expert that this runner doesn't have. Such a row's number of the expert is in `needed_B`, else -1; the
        Segment has the B rows in the order in which they came.

        `rows` are of one plan and have had as many velocities each. They stay unchanged, so a caller may repeat a
        segment elsewhere. `seconds` from now are allowed (None: the engine chooses from its own speed). Cancelling the
        call makes the rows leave before the next velocity.

        Raises OverloadedError at once if the work doesn't fit into `seconds`, DeadlineError after them, AwayError if no
        replica could answer, StartingError if the first one takes long to start, ExpertError if an expert's weights
        don't come, NotFiniteError or ExpertCountError for networks that answer with nonsense, and ServeError if the
        engine stops.
        """


@dataclass(frozen=True)
class Runners:
    """The runners of one version of a mixture, wherever its networks are placed.

    `of_expert[k]` has expert k and a router (None: no weights are published yet). `mixing` uses all experts within a
    step. `engine`: the one of this process, to be closed after the last request.
    """

    of_expert: Sequence[Runner | None]
    mixing: Runner
    engine: EngineThread
