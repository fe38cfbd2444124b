"""Worlds of real ranks over gloo, without Ray, undisturbed or after faults: `python -m tests.train.ranks FOLDER CASES`.

CASES is a JSON object: name -> {"settings": [...], "legs": [...]}; one with "artifact" trains that, of a run whose
experts are there. A leg has "worlds" (1 unless given) of "world" ranks each that train "artifact" (an expert unless
given) at once, and TrainPlacement's fields. With "stop" the last rank has notice after so many steps of the run that
its machine is about to go. With "fault": {"signal", "rank", "step"} that rank and what it started get the signal as it
has taken so many steps, and with "seconds" that is how long it may take. One that is stopped goes on after the last
leg; with "waits" it then waits between two steps until it has seen that it was overtaken. With "fault": {"rival",
"step"} that rank claims a newer attempt instead, which lives until it is seen. Prints, by case, what was seen of each
leg; raises if a rank fails though nothing disturbed it.

This process only forks, after the imports, which makes ranks cheap, and reads: storage's threads wouldn't survive it.
"""

import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from itertools import count
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

from ddm_ray.errors import Preempted
from ddm_ray.jobs.attempts import Attempt, claim
from ddm_ray.placement import TrainPlacement
from ddm_ray.run.graph import Artifact
from ddm_ray.store.store import Store
from ddm_ray.train import local, membership, worker
from tests.processes import family, state_of
from tests.random_run import make_data, make_run
from tests.train import preloaded  # noqa: F401
from tests.train.results import files

EXPERT = Artifact("experts/001")
ENDS_SECONDS = 240.0
FORK = mp.get_context("fork")


def rank_main(rank: int, world: int, rendezvous: str, url: str, first: int, leg: dict[str, Any]) -> None:
    fault, stop, artifact = leg.pop("fault", None), leg.pop("stop", None), Artifact(leg.pop("artifact", EXPERT))
    steps = count(first + 1)
    if fault and not fault.keys().isdisjoint(("rival", "waits")):
        membership.LOOK_SECONDS = 0.02

    def notice() -> bool:
        step = next(steps)
        if fault and rank == fault["rank"] and step == fault["step"]:
            if "signal" in fault:
                for pid in reversed(family(os.getpid())):
                    os.kill(pid, signal.Signals[fault["signal"]])
            else:
                wait_until_overtaken(live(claim(Store(url), artifact)))
            if fault.get("waits"):
                wait_until_overtaken(count())
        return step == stop and rank == world - 1

    with local.world(rank, world, rendezvous):
        try:
            worker.train(url, artifact, TrainPlacement.model_validate(leg), notice)
            assert stop is None
        except Preempted:
            assert stop is not None


def data_main(rank: int, url: str, settings: tuple[str, ...], experts: bool = False) -> None:
    """Make a run's data in a process of its own: pyarrow's threads don't survive a fork."""
    if experts:
        make_run(url, settings=settings, num_rows=120)
    else:
        make_data(url, settings=settings)


def live(attempt: Attempt) -> Iterator[None]:
    """Have an attempt beat once for each item."""
    for number in count(1):
        yield attempt.beat({"beat": number, "phase": "training", "step": number})


def wait_until_overtaken(meanwhile: Iterator[Any]) -> None:
    """Wait until this process' watcher has ended, as it does once it sees a successor."""
    deadline = time.monotonic() + ENDS_SECONDS / 4
    while any(thread.name == "watcher" for thread in threading.enumerate()) and time.monotonic() < deadline:
        next(meanwhile)
        time.sleep(0.01)


class Leg:
    """Ranks that train at once, after `first` steps."""

    def __init__(self, url: str, first: int, leg: dict[str, Any]):
        self.url, leg = url, dict(leg)
        world, num_worlds, self.seconds = leg.pop("world"), leg.pop("worlds", 1), leg.pop("seconds", ENDS_SECONDS)
        self.disturbed = num_worlds > 1 or "fault" in leg
        self.ranks: list[ForkProcess] = []
        for _ in range(num_worlds):
            rendezvous = tempfile.mktemp(prefix="rendezvous-", dir=Path(url).parent)
            for rank in range(world):
                process = FORK.Process(target=rank_main, args=(rank, world, rendezvous, url, first, leg))
                process.start()
                self.ranks.append(process)

    def settle(self) -> dict[str, Any]:
        """Wait until every rank has ended or is stopped: how they ended, and how long the others outlived the first."""
        first: float | None = None
        deadline = time.monotonic() + self.seconds
        while any(rank.is_alive() and state_of(rank.pid) != "T" for rank in self.ranks):
            if first is None and any(not rank.is_alive() or state_of(rank.pid) == "T" for rank in self.ranks):
                first = time.monotonic()
            if time.monotonic() > deadline:
                states = [(rank.exitcode, rank.is_alive() and state_of(rank.pid)) for rank in self.ranks]
                for rank in self.ranks:
                    rank.kill()
                raise SystemExit(f"{self.url}: ranks neither end nor stop: {states}")
            time.sleep(0.01)
        outlived = 0.0 if first is None else time.monotonic() - first
        codes = [rank.exitcode for rank in self.ranks]
        if any(codes) and not self.disturbed:
            raise SystemExit(f"{self.url}: ranks ended with {codes}")
        return {"codes": codes, "outlived": outlived}

    def go_on(self) -> list[int | None]:
        """Let those that are stopped go on to their end: their exit codes."""
        stopped = [rank for rank in self.ranks if rank.is_alive()]
        for rank in stopped:
            for pid in family(rank.pid):
                os.kill(pid, signal.SIGCONT)
        for rank in stopped:
            rank.join(ENDS_SECONDS)
            if rank.is_alive():
                rank.kill()
        return [rank.exitcode for rank in stopped]


def case_of(url: str, case: dict[str, Any]) -> list[dict[str, Any]]:
    """Carry one case out; what each leg saw: `settle`, the files it left, and how the stopped went on."""
    data = FORK.Process(target=data_main, args=(0, url, case["settings"], "artifact" in case))
    data.start()
    data.join()
    artifact, done, legs, seen = case.get("artifact", EXPERT), 0, list[Leg](), []
    for leg in case["legs"]:
        legs.append(Leg(url, done, {"artifact": artifact, **leg}))
        seen.append(legs[-1].settle() | {"files": files(Path(url) / EXPERT)})
        done = leg.get("stop", 0)
    for started, saw in zip(legs, seen, strict=True):
        saw["went_on"] = started.go_on()
    seen[-1]["files_at_last"] = files(Path(url) / EXPERT)
    return seen


def main(folder: str, cases: dict[str, Any]) -> None:
    print(json.dumps({name: case_of(str(Path(folder) / name), case) for name, case in cases.items()}))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
