"""An island's worker without Ray, which trains in its own process."""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Thread

from ddm_ray.errors import DDMError
from ddm_ray.islands import choose, work
from ddm_ray.islands.run_view import RunObserver, work_of
from ddm_ray.islands.work import IslandWorker
from ddm_ray.islands.worker_heartbeat import WorkerHeartbeat, last_speed
from ddm_ray.jobs.launches import Launch
from ddm_ray.jobs.status import Status, status
from ddm_ray.placement import TrainPlacement
from ddm_ray.run.graph import MONOLITH, trained_of
from ddm_ray.run.run import Run
from ddm_ray.train import local, membership, worker
from ddm_ray.train.engine import Engine


def train(run: Run, launch: Launch, watch: Callable[[list[Status]], None]) -> None:
    """Train in this thread, watched by another one, as Ray's driver watches its workers."""
    ended = Event()

    def look() -> None:
        while not ended.wait(0.05):
            with suppress(DDMError):
                watch([status(run, launch.artifact)])

    thread = Thread(target=look)
    thread.start()
    try:
        worker.train(run.url, launch.artifact, TrainPlacement(checkpoint_steps=20), launch=launch)
    finally:
        ended.set()
        thread.join()


def slow_down(seconds: float) -> None:
    """Have each step of this process take so many seconds more."""
    step = Engine.step

    def slow_step(self: Engine, learning_rate: float) -> float:
        time.sleep(seconds)
        return step(self, learning_rate)

    Engine.step = slow_step  # type: ignore[method-assign]


def main(url: str, name: str, lease: float, log: str, slower: float, move_seconds: float) -> None:
    """Work for the island of that name until the run is finished, or it is drained; lines go to a file.

    Each step takes `slower` seconds more than it would; to move a job is thought to cost `move_seconds`.
    """
    membership.LOOK_SECONDS = work.LOOK_SECONDS = 0.1  # a tiny training ends within seconds
    choose.MOVE_SECONDS = move_seconds
    if slower:
        slow_down(slower)
    with open(log, "a", buffering=1) as sink:
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
    run, printed = Run.open(url), set[str]()
    artifacts = [artifact for artifact in trained_of(run.config) if artifact != MONOLITH]

    def report(statuses: list[Status], doing: str) -> None:
        if doing not in printed:
            print(f"{name} {doing}", flush=True)
        printed.add(doing)

    with local.world(), WorkerHeartbeat(run.store, name, lease, speed=last_speed(run.store, name)) as heartbeat:
        observer = RunObserver(run, artifacts, work_of(run))
        print(name, IslandWorker(run, heartbeat, observer, train, report).run_to_end(), flush=True)
