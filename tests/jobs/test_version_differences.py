"""Where jobs run and what with, as `ddm status` tells of their heartbeats."""

import re

from click.testing import CliRunner

from ddm_ray.cli import main
from ddm_ray.jobs.attempts import claim
from ddm_ray.jobs.job_status import JobStatus
from ddm_ray.jobs.launches import Launch, place_of
from ddm_ray.jobs.status import Status
from ddm_ray.jobs.versions import differences
from ddm_ray.run.graph import Artifact, expert
from ddm_ray.run.run import Run
from tests.jobs.attempts import TOLD, beat, fail

OLD, NEW = {"python": "3.11.9", "torch": "2.7.1"}, {"python": "3.11.9", "torch": "2.8.0"}


def job(artifact: Artifact, versions: object) -> Status:
    return Status(artifact, "begun", job=JobStatus(1, {"versions": versions}, None, None, 0))


def test_versions_that_differ_are_named_with_their_jobs() -> None:
    jobs = [job(expert(0), OLD), job(expert(1), NEW), job(expert(2), NEW), Status(expert(3), "waiting")]
    assert differences(jobs) == ["torch: 2.8.0 (experts/001, experts/002); 2.7.1 (experts/000)"]
    (line,) = differences([jobs[0], job(expert(1), {"torch": "\x1b[2J" + 200 * "8"})])
    assert line.isprintable() and len(line) < 200
    assert differences([*jobs[1:], job(expert(4), None), job(expert(5), "2.8")]) == []


def test_device_slots_as_far_as_they_are_known() -> None:
    assert place_of({"island": "north", "host": "n7", "job": "raysubmit_7"}) == (
        " on island north, host n7, job raysubmit_7"
    )
    assert place_of({"island": "\x1b[2J\n" + 200 * "n"}) == " on island \\x1b[2J " + 92 * "n"
    assert place_of({"host": "n7", "job": ""}) == " on host n7" and place_of({}) == ""


def test_status_says_where_the_newest_attempt_runs_and_which_versions_differ(partitioned: Run) -> None:
    store = partitioned.store
    for number, versions in enumerate((OLD, NEW)):
        place = Launch(expert(number), island="north", job="raysubmit_7").place
        attempt = claim(store, expert(number))
        beat(attempt, 1, 5, **place, versions=versions)
        fail(attempt, "lost")
    laptop = claim(store, Artifact("router"))
    beat(laptop, 1, 5, versions=OLD)
    fail(laptop, "lost")
    done = CliRunner().invoke(main, ["status", partitioned.url, "--long"])
    lines = dict(re.findall(r"^  (\S+) +failed +\d+%  (.*)$", done.output, re.MULTILINE))
    assert f", attempt 1 on island north, host {TOLD['host']}, job raysubmit_7, at step 5/300;" in lines["experts/001"]
    assert ", attempt 1, at step 5/300;" in lines["router"]
    assert "warning: jobs have different versions of torch: 2.7.1 (experts/000, router); 2.8.0 (experts/001)\n" in (
        done.stderr
    )
