"""`ddm islands check`: the list of checks as a job on a real island, and what is said where no job can run."""

import json
import re
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

from ddm_ray.cli import main
from ddm_ray.errors import RayAway
from ddm_ray.islands.checks import CHECKS
from ddm_ray.islands.jobs import JobsAPI
from ddm_ray.run.run import Run
from tests.conftest import Island, ddm
from tests.random_run import make_data

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_data(str(tmp_path_factory.mktemp("checked") / "run"), num_rows=60)


@pytest.fixture
def command(island: Island, run: Run, tmp_path: Path) -> list[str]:
    """The command for a file of one sound island, and of others each with a fault."""
    (tmp_path / "token").write_text("0" * 64)
    north = {"jobs": island.jobs, "token_file": str(island.token)}
    islands = {
        "north": north,
        "crowded": north | {"workers": 64},
        "strange": north | {"token_file": str(tmp_path / "token")},
        "south": north | {"jobs": "http://127.0.0.1:1"},
        "west": {},
    }
    (tmp_path / "islands.yaml").write_text(json.dumps({"islands": islands}))
    return ["islands", "check", run.url, "--islands", str(tmp_path / "islands.yaml")]


def test_a_sound_island_is_a_line_for_each_check(command: list[str], run: Run) -> None:
    """Through Ray itself, and nothing is left on storage."""
    before = {path: path.stat().st_mtime_ns for path in Path(run.url).rglob("*")}
    done = ddm(*command, "--island", "north")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [f"north  {each.__name__} sound" for each in CHECKS]
    assert {path: path.stat().st_mtime_ns for path in Path(run.url).rglob("*")} == before


@pytest.mark.chaos
def test_what_is_wrong_is_a_line_with_the_remedy(command: list[str]) -> None:
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 1
    lines = [line for line in done.stdout.splitlines() if not line.endswith(" sound")]
    beginnings = (
        "crowded  workers wrong: placement asks for 64 x 1 CPU, Ray has 4; change workers or resources_per_worker in",
        "south    http://127.0.0.1:1 can't be reached: Connection refused",
        "strange  .* refuses this token; name the file that has its token as token_file",
        "west     no Jobs API is named; add jobs: http://HEAD:8265 to it",
    )
    assert len(lines) == len(beginnings)
    for line, beginning in zip(sorted(lines), beginnings, strict=True):
        assert re.match(beginning, line), done.stdout
    assert done.stderr.splitlines()[-1] == "error: 4 of 5 islands can't train this run: see above"


def test_a_run_that_an_island_does_not_see_is_named_by_its_own_command(
    island: Island, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one whose shell doesn't know the command says so."""
    monkeypatch.setattr("shlex.join", lambda words: "ddm doctor /nowhere/run --placement '{}'")
    done = CliRunner().invoke(main, [*command, "--island", "north"])
    assert "north  the job FAILED: error: /nowhere/run is not a run" in done.stdout
    monkeypatch.setattr("shlex.join", lambda words: "PATH=/none; ddm doctor x")
    done = CliRunner().invoke(main, [*command, "--island", "north"])
    assert re.search("north  the job FAILED: .*ddm: .*not found", done.stdout)


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_job_that_does_not_end_is_stopped(island: Island, interrupted: bool) -> None:
    jobs, event = JobsAPI("north", island.jobs, str(island.token)), threading.Event()
    if interrupted:
        event.set()
    with pytest.raises(RayAway, match=r"the job is (PENDING|RUNNING|lost) after"):
        jobs.run("sleep 300", 600 if interrupted else 1, event)
