"""An owner that is cut off from storage for a while, during which another one begins the same expert."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path

from ddm_ray.jobs.attempts import claimed
from ddm_ray.run.info import TrainedInfo
from ddm_ray.run.run import Run
from tests.s3_wire import Fault, Request, wire
from tests.train.ranks import EXPERT
from tests.train.s3_faults import MOMENTS, Trainer, files_of, trainer

CUTS = ("claim", "mid", "commit")
"""Before an owner has its number, within a state, and after it has tidied up, before its artifact has a manifest."""
SECONDS = (5.0, 60.0, 600.0)
SILENT = (Fault.HANGS, Fault.DROPPED)
COMMIT = MOMENTS["commit"]


@dataclass(frozen=True)
class Cut:
    """A moment from which an owner's requests come to nothing for `seconds`: no answer, or none heeded."""

    seed: int
    moment: str
    seconds: float

    def __str__(self) -> str:
        return f"seed {self.seed}: cut off for {self.seconds:.0f} s from {self.moment} on, {SILENT[self.seed % 2].name}"


def cuts(each: int) -> list[Cut]:
    """`each` cuts of every length at every moment."""
    return [Cut(seed, moment, seconds) for seed, seconds, moment in product(range(each), SECONDS, CUTS)]


@dataclass(frozen=True)
class Outcome:
    """What became of it: how both ended, the expert's files, and how many manifests and attempts it has had.

    `writers`: how many of both wrote anything into the attempt that counts; states that it has overtaken the newer one
    of two attempts deletes.
    """

    statuses: tuple[int, int]
    files: dict[str, bytes]
    manifests: int
    attempts: int
    writers: int


class Rivals:
    """Two trainers of the same server."""

    def __init__(self, owner: Trainer, rival: Trainer):
        self.owner, self.rival = owner, rival

    def train(self, cut: Cut) -> Outcome:
        """Train an expert of a new run by both."""
        url, began = self.owner.make_run(), threading.Event()
        with wire(self.owner.server) as mine, wire(self.rival.server) as its, ThreadPoolExecutor(2) as pool:
            start = float("inf")

            def rule(request: Request) -> Fault | None:
                nonlocal start
                if start == float("inf") and request.matches(MOMENTS[cut.moment]):
                    start = request.at
                    began.set()
                return SILENT[cut.seed % 2] if 0.0 <= request.at - start < cut.seconds / self.owner.scale else None

            mine.rule = rule
            owner = pool.submit(self.owner.train_on, url, mine)
            owner.add_done_callback(lambda _: began.set())
            began.wait()
            rival = pool.submit(self.rival.train_on, url, its)
            statuses = owner.result(), rival.result()
            run = Run.open(url)
            manifest = run.require(EXPERT)
            winner = TrainedInfo.of(manifest).weights.split("/")[1]
            heeded = [[each for each in through.requests if 200 <= each.status < 300] for through in (mine, its)]
        commits = [each for each in chain(*heeded) if each.matches(COMMIT)]
        written = [
            {each.key for each in of if each.method in ("PUT", "POST") and f"/attempts/{winner}/" in each.key}
            for of in heeded
        ]
        writers = sum(map(bool, written))
        return Outcome(statuses, files_of(run), len(commits), len(claimed(run.store, EXPERT)), writers)

    def train_within(self, pattern: str) -> tuple[tuple[int, int], Run]:
        """Have the owner wait, at its first request of a pattern, until the rival has trained it all; both's exits."""
        url, exits = self.owner.make_run(), list[int]()
        with wire(self.owner.server) as mine, wire(self.rival.server) as its:

            def rule(request: Request) -> Fault | None:
                if not exits and request.matches(pattern):
                    exits.append(self.rival.train_on(url, its))
                return None

            mine.rule = rule
            exits.append(self.owner.train_on(url, mine))
        return (exits[1], exits[0]), Run.open(url)


@contextmanager
def rivals(server: str, folder: Path, scale: float) -> Iterator[Rivals]:
    """Two trainers, of which the first one's runs are trained by both."""
    with trainer(server, folder / "owner", scale) as owner, trainer(server, folder / "rival", scale) as rival:
        yield Rivals(owner, rival)
