"""The short form of `ddm status`: a line for each model in 80 columns, and everything that is wrong below."""

import re
from itertools import count
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.cells import cell_len

from ddm_ray.cli import main
from ddm_ray.cli.short_status import notes, table
from ddm_ray.config import load_recipe
from ddm_ray.jobs.attempts import Attempt, claim
from ddm_ray.jobs.judge import Sightings
from ddm_ray.jobs.launches import Launch, noted
from ddm_ray.jobs.observer import observe
from ddm_ray.jobs.status import Status, survey
from ddm_ray.run.graph import MONOLITH, ROUTER, expert
from ddm_ray.run.run import Run
from tests.jobs.attempts import beat, fail, finish
from tests.random_run import make_data

BEATS = count(2)
WHY = "[Errno 28] no space left on the device; 空きがありません, " + "as this machine says " * 20


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with a model in each state: expert 0 trains, expert 1 has failed, the router is silent, one is finished."""
    run = make_data(str(tmp_path_factory.mktemp("short") / "run"), num_rows=60)
    beat(claim(run.store, expert(0)), 1, 75)
    fail(claim(run.store, expert(1)), WHY, final=True)
    beat(claim(run.store, ROUTER), 1, 100_000, 200_000, phase="measuring")
    finish(run, MONOLITH)
    return run


def observed(run: Run) -> list[Status]:
    """The statuses half a minute later, in which only expert 0 has shown a sign of life."""
    sightings = Sightings()
    observe(survey(run), sightings, 0.0)
    beat(Attempt(run.store, expert(0), 1), next(BEATS), 75)
    return observe(survey(run), sightings, 30.0)


def texts(statuses: list[Status], width: int = 80) -> list[str]:
    return [text for _, text in table(statuses, width)]


def test_each_model_has_a_line(run: Run) -> None:
    rows, partition, first, second, router, monolith, student = texts(observed(run))
    assert rows.split() == ["rows", "finished", "━" * 12, "100%", "60", "images"]
    assert partition.split() == ["partition", "finished", "━" * 12, "100%", "2", "clusters"]
    assert re.split(r" {2,}", first)[-3:] == ["75/300", "loss 0.1235", "18 s left"]
    assert first.split()[:5] == ["expert", "0", "training", "━━━─────────", "25%"]
    assert re.match(r"expert 1 +failed +─+ +0%  \[Errno 28] no space", second) and second.endswith("…")
    assert re.match(r"router +silent +━{6}─{6} +50%  100000/200000  loss 0.1235$", router)
    assert re.match(r"monolith +finished +━{12} 100% +300 steps  loss 0.2500  in 2 s$", monolith)
    assert re.fullmatch(r"student +waiting +─{12}", student)
    columns = {line.index("loss") for line in (first, router, monolith)}
    assert len(columns) == 1, "losses stand below each other"


@pytest.mark.parametrize("width", [30, 40, 60, 80, 200])
def test_no_line_is_wider_than_the_terminal(run: Run, width: int) -> None:
    statuses = observed(run)
    assert max(map(cell_len, texts(statuses, width))) <= width
    assert all(("━" in line or "─" in line) == (width >= 80) for line in texts(statuses, width))
    lines = list(notes(statuses, width))
    commands = [line for line in lines if "`ddm " in line]  # a terminal wraps them, and copies them whole
    assert [line.count("`") for line in commands] == [2, 2]
    assert max(len(line) for line in lines if line not in commands) <= width or width < 60


def test_what_is_wrong_is_said_in_full_below(run: Run) -> None:
    failed, silent = notes(observed(run), None)
    assert WHY.strip() in failed and failed.startswith("expert 1: failed: ") and "`ddm train" in failed
    assert silent.startswith("router: silent for 30 s, measuring at step 100000/200000") and "if it died" in silent
    wrapped = list(notes(observed(run), 80))
    assert any(line.startswith("  once that is mended, `ddm") for line in wrapped)
    words = [line.split() for line in (f"{failed} {silent}".replace("; ", " "), " ".join(wrapped))]
    assert "".join(words[0]) == "".join(words[1])


def test_alarms_are_marked(run: Run) -> None:
    assert {line.name for line, _ in table(observed(run), 80) if line.alarm} == {"expert 1", "router"}


def test_a_launch_without_an_attempt_is_no_alarm_while_it_lives(tmp_path: Path) -> None:
    run = make_data(str(tmp_path / "run"), num_rows=60)
    with noted(run.store, Launch(expert(0))):
        (line,) = [line for line, _ in table(survey(run), 80) if line.name == "expert 0"]
        assert (line.word, line.alarm) == ("starting", False) and not list(notes(survey(run), 80))


def test_the_rows_and_shards_of_owners_share_lines(tmp_path: Path) -> None:
    settings = ("partition.method=given", "partition.num_clusters=16", "data.num_classes=10", "router.replay=100")
    run = Run.create(str(tmp_path / "run"), load_recipe("tiny", settings))
    lines = texts(survey(run))
    others = [line.split()[0] for line in lines if not line.startswith("expert ")]
    assert others == ["rows", "shards", "partition", "replays", "router"]
    assert "0 of 16 finished" in lines[0] and sum(line.startswith("expert ") for line in lines) == 16


def test_the_newest_picture_is_named(tmp_path: Path) -> None:
    def last_lines(*words: str) -> list[str]:
        return CliRunner().invoke(main, ["status", run.url, *words]).stdout.splitlines()[-2:]

    run = make_data(str(tmp_path / "run"), num_rows=60)
    assert not any("newest" in line for line in last_lines())
    finish(run, MONOLITH)
    key = f"{MONOLITH}/attempts/0001/weights/step-000000300/grid.png"
    run.store.write(key, b"png")
    assert last_lines() == ["newest picture, of monolith after 300 steps:", f"  {run.url}/{key}"]
    attempt = claim(run.store, expert(0))
    fail(attempt, "lost")
    for step in (80, 150):
        run.store.write(attempt.picture_key(step), b"png")
    newer = ["newest picture, of experts/000 after 150 steps:", f"  {run.url}/{attempt.picture_key(150)}"]
    assert last_lines() == last_lines("--long") == newer, "of what isn't finished"


def test_the_command_prints_it_and_the_whole_on_request(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddm_ray.jobs.observer.survey_once", survey)  # which doesn't wait for signs of life
    short = CliRunner().invoke(main, ["status", run.url])
    assert short.exit_code == 0, short.output
    head, where, *lines = short.stdout.splitlines()
    assert (head, where) == (f"run 'tiny', configuration {run.fingerprint}", f"  at {run.url}")
    assert [line.split("  ")[0] for line in lines[:7]] == [
        *("rows", "partition", "expert 0", "expert 1", "router", "monolith", "student")
    ]
    assert max(map(cell_len, [head, *lines[:7]])) <= 80 and "\x1b" not in short.output
    assert short.stderr == "", "nothing but the answer in a pipe"
    full = CliRunner().invoke(main, ["status", run.url, "--long"])
    assert re.search(r"^  experts/000 +begun +25%  .*2 workers, .*attempt 1", full.stdout, re.MULTILINE)
