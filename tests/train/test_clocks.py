"""Jobs on machines whose clocks are a day off, one ahead and one behind: who lives and who doesn't is seen alike."""

import subprocess
import sys
import time
from pathlib import Path

from ddm_ray.jobs.attempts import heartbeat
from ddm_ray.jobs.describe import describe
from ddm_ray.jobs.observer import survey_once
from ddm_ray.jobs.status import Status
from ddm_ray.store.store import Store
from ddm_ray.watch.gauges import gauge_values
from tests.conftest import ROOT, wait_for
from tests.jobs.attempts import age
from tests.random_run import make_data
from tests.train.test_telemetry import events_of

DAY = 86400.0
TRAIN = """
import sys, time
real, (url, job, offset) = time.time, sys.argv[1:]
time.time = lambda: real() + float(offset)
from ddm_ray.run.graph import Artifact
from ddm_ray.train import local
local.train_locally(url, [Artifact(job)])
"""


class Clock:
    """An observer's clock on which waiting takes no time."""

    def __init__(self) -> None:
        self.now = -DAY

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_who_lives_is_seen_by_any_clock(tmp_path: Path) -> None:
    settings = ("expert.train.steps=10000000", "expert.train.global_batch=12")
    run, log = make_data(str(tmp_path / "run"), settings=settings, num_rows=100), tmp_path / "log"
    offsets = dict(zip(run.experts, (DAY, -DAY), strict=True))

    def jobs(statuses: list[Status]) -> list[Status]:
        return [each for each in statuses if each.artifact in offsets]

    with log.open("wb") as sink:
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", TRAIN, run.url, job, str(offset)], cwd=ROOT, stdout=sink, stderr=sink
            )
            for job, offset in offsets.items()
        ]
    try:
        for job in offsets:
            wait_for(lambda job=job: (heartbeat(run.store, job) or {}).get("phase") == "training", 120, log.read_text)
        for living in jobs(survey_once(run)):
            assert living.state == "begun" and not living.may_be_dead, describe(living)
            assert gauge_values(living)["ddm_silent_seconds"] < 10
        for job, offset in offsets.items():
            wait_for(lambda job=job: events(run.store, job), 60, log.read_text)
            assert abs(events(run.store, job)[0].wall_time - time.time() - offset) < DAY / 2, "its clock is off"
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for seconds in (-DAY, 2 * DAY):
        age(Path(run.url), seconds)
        clock = Clock()
        for dead in jobs(survey_once(run, clock, clock.sleep)):
            assert dead.silent and dead.seconds_left is None, describe(dead)
            assert gauge_values(dead)["ddm_silent_seconds"] > 10


def events(store: Store, job: str) -> list:
    """The events of a job's first file of curves."""
    folder = f"{job}/attempts/0001/tensorboard"
    return next((events_of(store.read(f"{folder}/{name}")) for name in sorted(store.sizes(folder))), [])
