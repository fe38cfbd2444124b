"""What a supervisor decides without asking anybody: ids, pauses, the newest job, the line that says why."""

import pytest

from ddm_ray.errors import ConfigError
from ddm_ray.islands.jobs import SubmittedJob
from ddm_ray.islands.supervisor import JobSupervisor, complaint, last, pause, short_lived, submission_id
from ddm_ray.placement import Island


def test_an_id_is_the_same_for_all_who_submit_the_same_and_another_for_all_else() -> None:
    ids = [
        submission_id(run, island, number)
        for run in ("s3://lab/run7", "s3://lab/run70")
        for island in ("north", "north 7", "north-7", "../etc", "n" * 300)
        for number in (1, 2, 11)
    ]
    assert len(set(ids)) == len(ids)
    assert submission_id("s3://lab/run7", "north", 2) == submission_id("s3://lab/run7", "north", 2)
    assert all(set(each) <= set("abcdefghijklmnopqrstuvwxyz0123456789-") and len(each) < 80 for each in ids)


def test_pauses_double_up_to_a_minute() -> None:
    assert [pause(short) for short in range(10)] == [1, 1, 2, 4, 8, 16, 32, 60, 60, 60]


@pytest.mark.parametrize(
    ("seconds", "short"),
    [
        ([], 0),
        ([5], 1),
        ([5, 5], 2),
        ([5, 5, 700], 0),
        ([5, 700, 5], 1),
        ([5, None, 5, 599], 2),
        ([5] * 300, 7),
    ],
)
def test_pauses_go_on_where_another_conductor_left_them(seconds: list[float | None], short: int) -> None:
    """They are counted from what the island has of its jobs; all of these ended."""
    jobs = {number: SubmittedJob(f"{number}", "FAILED", seconds=each) for number, each in enumerate(seconds, start=1)}
    asked: list[int] = []

    def ask(number: int) -> SubmittedJob | None:
        asked.append(number)
        return jobs.get(number)

    assert short_lived(ask, len(seconds)) == short
    assert len(asked) <= 7


@pytest.mark.parametrize("newest", [0, 1, 2, 3, 7, 8, 9, 100, 1023])
@pytest.mark.parametrize("known", [0, 1, 5])
def test_the_last_number_takes_few_questions(newest: int, known: int) -> None:
    asked = []

    def ask(number: int) -> str | None:
        asked.append(number)
        return f"job {number}" if number <= newest else None

    if newest > known:
        assert last(ask, known) == (newest, f"job {newest}")
    else:
        assert last(ask, known) == (known, None)
        assert asked == [known + 1]
    assert len(asked) <= 2 * newest.bit_length() + 1
    assert min(asked) > known


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ([], ""),
        (["", "  "], ""),
        (["a", "b", ""], "b"),
        (["error: no key", "(raylet) x"], "error: no key"),
        (["/bin/sh: 1: ddm: not found", "Running entrypoint for job x: ddm work"], "/bin/sh: 1: ddm: not found"),
        (["error: one", "error: two\x1b[0m", "y"], r"error: two\x1b[0m"),
    ],
)
def test_the_line_of_a_log_that_says_why(log: list[str], line: str) -> None:
    assert complaint(log) == line


def test_islands_that_cannot_be_conducted() -> None:
    with pytest.raises(ConfigError, match="no island of the file names its Jobs API; give one jobs"):
        JobSupervisor("/runs/7", {"a": Island(name="a")}, lambda island: "true")
    elsewhere = Island(name="a", jobs="http://a:8265", storage="s3://lab")
    with pytest.raises(ConfigError, match="the runs of island a lie below s3://lab"):
        JobSupervisor("/runs/7", {"a": elsewhere}, lambda island: "true")
    both = {"a": Island(name="a"), "b": Island(name="b", jobs="http://b:8265")}
    assert [*JobSupervisor("/runs/7", both, lambda island: "true").islands] == ["b"]
