"""What a supervisor decides without asking anybody: ids, pauses, the newest job, the line that says why."""

import pytest

from ddm_ray.errors import ConfigError
from ddm_ray.islands.supervisor import JobSupervisor, complaint, last, submission_id
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
    both = {"a": Island(name="a"), "b": Island(name="b", jobs="http://b:8265")}
    assert [*JobSupervisor("/runs/7", both, lambda island: "true").islands] == ["b"]
