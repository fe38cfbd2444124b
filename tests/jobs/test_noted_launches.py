"""A launch is seen on storage before its first attempt, and so is what ended it."""

import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ddm_ray.cli import main
from ddm_ray.cli.fixes import phrase
from ddm_ray.errors import ConfigError, DDMError, RayAway
from ddm_ray.exit_codes import EXIT_AGAIN
from ddm_ray.jobs.attempts import claim
from ddm_ray.jobs.describe import describe, line
from ddm_ray.jobs.judge import Sightings
from ddm_ray.jobs.launches import Launch, noted
from ddm_ray.jobs.observer import observe, survey_once
from ddm_ray.jobs.status import status
from ddm_ray.remedies import Give
from ddm_ray.run.graph import expert
from ddm_ray.run.run import Run
from ddm_ray.watch.events import Events
from tests.conftest import ddm
from tests.jobs.attempts import beat, fail

pytestmark = pytest.mark.contract

JOB = expert(0)
AWAY = RayAway("no Ray to join at head:6379: refused", Give("address", "name another Ray"))


def launch(
    run: Run, error: BaseException | None = None, island: str = "north", meanwhile: Callable[[Launch], object] = str
) -> None:
    """A launch that is ended by an error, or as if it were killed; before its first attempt, but for `meanwhile`."""
    begun = Launch(JOB, island=island, job="raysubmit_7")
    if error is None:
        noted(run.store, begun).__enter__()
        return

    def train() -> None:
        with noted(run.store, begun):
            meanwhile(begun)
            raise error

    with pytest.raises(type(error)):
        train()


def assert_matches(pattern: str, text: str) -> None:
    assert re.search(pattern, text), text


def text_of(run: Run) -> tuple[str, str]:
    seen = status(run, JOB)
    return seen.state, describe(seen, phrase)


@pytest.mark.parametrize(
    ("change", "word", "text"),
    [
        ({}, "starting", r"^starting: launched .*, no attempt yet$"),
        (
            {"pid": 2**31 - 1},
            "ended",
            r"^launched .*, and that command has ended without an attempt; `ddm work .*` on any island starts",
        ),
        ({"processes": "elsewhere"}, "launched", r"^waiting: launched .*, no attempt yet$"),
    ],
)
def test_a_job_that_starts_is_told_from_one_that_ended_and_from_one_that_nobody_began(
    run: Run, change: dict[str, Any], word: str, text: str
) -> None:
    assert line(status(run, JOB)).split()[1:] == ["waiting", "0%", "waiting"]
    launch(run)
    (record,) = (Path(run.url) / JOB).rglob("BEGUN-0000")
    record.write_text(json.dumps(json.loads(record.read_text()) | change))
    assert line(status(run, JOB)).split()[1] == word
    assert_matches(text, text_of(run)[1])


def test_what_ended_it_before_its_first_attempt_is_told_with_what_mends_it(run: Run) -> None:
    launch(run, ConfigError("islands.yaml: no island 'nroth'"))
    launch(run, AWAY)
    state, text = text_of(run)
    assert state == "failed"
    assert text.startswith(
        "failed: no Ray to join at head:6379: refused; name another Ray with --address, launched on "
    )
    assert text.endswith(f", no attempt; `ddm work {run.url} --island NAME` on any island starts from step 0")
    launch(run, ConfigError("islands.yaml: no island 'nroth'"))
    assert "no attempt; once that is mended, `ddm work" in text_of(run)[1]
    launch(run)
    assert text_of(run)[0] == "waiting", "one that has begun since may do better"
    beat(claim(run.store, JOB), 1, 5)
    assert text_of(run)[0] == "begun"


def test_launches_in_vain_leave_no_more_than_their_places(run: Run) -> None:
    living = Launch(JOB, island="north")
    noted(run.store, living).__enter__()
    for attempts in (0, 1):
        for island in 3 * ("north", "south", ""):
            launch(run, AWAY, island)
        left = list(run.store.sizes(f"{JOB}/launches"))
        assert living.begun_key.removeprefix(f"{JOB}/launches/") in left
        assert len(left) == 1 + 2 * 3 * (attempts + 1)
        claim(run.store, JOB)
    assert "attempt 2" in text_of(run)[1]


KILLED = """
import os, sys
from ddm_ray.jobs.launches import Launch, noted
from ddm_ray.run.run import Run
with noted(Run.open(sys.argv[1]).store, Launch("experts/000", island="north")):
    os.kill(os.getpid(), 9)
"""


def test_launches_that_are_killed_leave_no_more_than_the_last(run: Run) -> None:
    """Without a word before their first attempt; one that lives, and one of another machine, stay."""
    living, elsewhere = Launch(JOB, island="north"), Launch(JOB, island="north")
    noted(run.store, living).__enter__()
    run.store.write(elsewhere.begun_key, json.dumps({"island": "north", "host": "n7.other", "pid": 2**22 + 1}).encode())
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", KILLED, run.url], capture_output=True, text=True, check=False)
        assert done.returncode == -9, done.stderr
    left = {f"{JOB}/launches/{name}" for name in run.store.sizes(f"{JOB}/launches")}
    assert {living.begun_key, elsewhere.begun_key} < left and len(left) == 3


HERE = socket.gethostname()


@pytest.mark.parametrize(
    "record",
    [
        *({"pid": pid} for pid in (None, "7", -1, 2**40, True)),
        *({"pid": 2**22 + 1, "processes": where} for where in ("another boot pid:[4026531836]", "", None)),
    ],
    ids=str,
)
def test_a_launch_of_no_process_here_is_left(run: Run, record: dict[str, Any]) -> None:
    """Nor of one in another container, whose host may have the same name, and its number may be nobody's here."""
    old = Launch(JOB, island="north")
    run.store.write(old.begun_key, json.dumps({"island": "north", "host": HERE, **record}).encode())
    launch(run)
    assert run.store.exists(old.begun_key)


def test_ctrl_c_is_ctrl_c_and_leaves_nothing_where_storage_answers(run: Run) -> None:
    launch(run, KeyboardInterrupt())
    assert text_of(run) == ("waiting", "waiting") and run.store.sizes(JOB) == {}

    def cut_off(_: Launch) -> None:
        folder = Path(run.url) / JOB
        folder.rename(f"{folder}-aside")
        folder.symlink_to(folder)  # a loop: nothing below can be asked for

    launch(run, KeyboardInterrupt(), meanwhile=cut_off)


def test_an_error_is_the_launchs_before_an_attempt_and_then_the_attempts(run: Run) -> None:
    launch(run, ModuleNotFoundError("No module named 'deepspeed'"))
    assert text_of(run)[1].startswith("failed: No module named 'deepspeed', launched on island north")

    def try_once(begun: Launch) -> None:
        fail(claim(run.store, JOB, begun.claim_fields()), "loss nan", final=True)

    launch(run, DDMError("loss nan"), meanwhile=try_once)
    assert not [name for name in run.store.sizes(f"{JOB}/launches") if name.endswith("GIVEN_UP")]
    assert text_of(run)[1].startswith("failed: loss nan, attempt 1; once")


def test_a_launch_in_vain_after_an_attempt_is_told_unless_that_lives(run: Run) -> None:
    attempt = claim(run.store, JOB)
    beat(attempt, 1, 5)
    launch(run, AWAY, island="south")
    assert "south" not in text_of(run)[1]
    silent = observe([status(run, JOB)], pulses := Sightings(), 0.0)
    (silent,) = observe(silent, pulses, 100.0)
    in_vain = (
        "; launched again on island south, host .*, job raysubmit_7, in vain: no Ray to join at head:6379: refused"
    )
    assert_matches(in_vain, describe(silent))
    fail(attempt, "lost")
    assert_matches(f"failed: lost, attempt 1, at step 5/300{in_vain}; ", text_of(run)[1])
    claim(run.store, JOB)
    assert text_of(run) == ("begun", "starting at step 0/300, attempt 2")
    fail(claim(run.store, JOB), "lost again")
    assert "in vain" not in text_of(run)[1], "there was an attempt since"


def test_a_launch_that_dies_unheard_stalls_once_it_had_time_to_start(run: Run) -> None:
    launch(run)
    events, pulses = Events(run.url, 60.0), Sightings()

    def seen(now: float) -> tuple[bool, list[str]]:
        (observed,) = observe([status(run, JOB)], pulses, now)
        return observed.silent, [event.event for event in events.seen([observed])]

    seen(0.0)
    assert [seen(now) for now in (61.0, 599.0, 601.0, 700.0)] == [
        *2 * [(False, [])],
        (True, ["stalled"]),
        (True, []),
    ]
    launch(run)
    assert seen(701.0) == (False, []), "another one starts"
    launch(run, AWAY)
    assert seen(702.0) == (False, ["failed"])


def test_for_how_long_a_launch_has_been_looked_at_is_told(run: Run) -> None:
    launch(run)
    (silent,) = [*observe([status(run, JOB)], Sightings(), 0.0)]
    assert_matches("^starting: .*, no attempt for 12 min$", describe(replace(silent, silent_seconds=720.0), phrase))
    (record,) = (Path(run.url) / JOB).rglob("BEGUN-0000")
    record.write_text(json.dumps(json.loads(record.read_text()) | {"processes": "elsewhere"}))
    again = f"if it died, `ddm work {run.url} --island NAME` on any island starts from step 0"
    pulses = Sightings()
    for now in (0.0, 599.0):
        (starts,) = observe([status(run, JOB)], pulses, now)
        assert_matches("^waiting: launched on island north, .*, no attempt yet$", describe(starts, phrase))
    (silent,) = observe([status(run, JOB)], pulses, 720.0)
    text = describe(silent, phrase)
    assert text.startswith("waiting: no attempt for 12 min, launched on island north, ") and text.endswith(f"; {again}")
    slept: list[float] = []
    (once,) = [each for each in survey_once(run, lambda: 0.0, slept.append) if each.artifact == JOB]
    assert not slept, "no sign is to come that were worth waiting for"
    assert describe(once, phrase).endswith(f", no attempt yet, and no sign of life before one; {again}")
    fail(claim(run.store, JOB), "lost")
    launch(run)
    assert_matches("^failed: lost, attempt 1; ", text_of(run)[1])


def test_a_record_that_cannot_be_read_still_says_that_there_was_one(run: Run) -> None:
    launch(run)
    (record,) = (Path(run.url) / JOB).rglob("BEGUN-0000")
    record.write_bytes(b"[")
    assert text_of(run) == ("waiting", "waiting: launched, no attempt yet")


def test_a_launch_by_a_clock_a_day_ahead_hides_no_later_one(run: Run) -> None:
    ahead = Launch(JOB, id=f"{'f' * 11}{'0' * 8}")
    noted(run.store, ahead).__enter__()
    fail(claim(run.store, JOB, ahead.claim_fields()), "lost")
    launch(run, AWAY, island="south")
    assert_matches("failed: lost, attempt 1.*; launched again on island south", text_of(run)[1])


def test_train_that_fails_early_is_seen_in_status(partitioned: Run) -> None:
    """As a job whose Ray tells it that it was submitted to it. This process may have joined a Ray already."""
    job = json.dumps({"metadata": {"job_submission_id": "raysubmit_7"}})
    where = ["--address", "127.0.0.1:1"]
    trained = ddm("train", partitioned.url, "expert", "0", *where, RAY_JOB_CONFIG_JSON_ENV_VAR=job)
    assert trained.returncode == EXIT_AGAIN, trained.stderr
    shown = CliRunner().invoke(main, ["status", partitioned.url, "--long"]).stdout.splitlines()
    (line,) = (line for line in shown if line.startswith("  experts/000 "))
    assert_matches(
        r"failed +0%  failed: no Ray to join at 127.0.0.1:1.*, launched on host \S+, job raysubmit_7, no", line
    )
