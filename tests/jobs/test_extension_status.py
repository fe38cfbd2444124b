"""Progress of extensions, in words and as JSON, and what it takes to see that."""

import json
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner

from ddm_ray import cli
from ddm_ray.config.longer import parse_steps
from ddm_ray.data.append import append
from ddm_ray.data.prepare.stage import prepare
from ddm_ray.data.sharded.serial import serial
from ddm_ray.jobs import extension_status
from ddm_ray.jobs.attempts import claim
from ddm_ray.jobs.extend import extend
from ddm_ray.jobs.extension_status import ExtensionStatus, extension_statuses
from ddm_ray.run.graph import MONOLITH, PARTITION, ROUTER, ROWS, Artifact, expert
from ddm_ray.run.manifest import NAME
from ddm_ray.run.run import RUN_FILE, Run
from tests.data.appended import make_base, make_data, write_digits
from tests.random_run import make_run, publish_models
from tests.run.artifacts import save_state
from tests.store_meter import StoreMeter

MORE = ("expert.train.steps=400",)


@pytest.fixture
def made(tmp_path: Path) -> Run:
    """A run that has finished all but student and monolith, with the states that it ended with."""
    run = make_run(str(tmp_path / "run"), num_rows=100)
    for job in (*run.experts, ROUTER):
        save_state(claim(run.store, job), 300, run.identity(job), {"rank-000/a": b"state"}, keep=2)
    run.store.delete(MONOLITH)
    return run


def beat(run: Run, job: Artifact, step: int) -> None:
    claim(run.store, job).beat({"beat": 1, "phase": "training", "step": step, "steps": 400})


def words(run: Run) -> dict[str, str]:
    return {each.url.removeprefix(f"{run.url}/extended/"): each.words() for each in extension_statuses(run)}


def ddm(*arguments: str) -> str:
    done = CliRunner().invoke(cli.main, [*arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_steps_are_those_of_the_jobs_that_it_has_itself(made: Run) -> None:
    assert words(made) == {}
    first = extend(made, parse_steps(MORE)).run
    assert words(made) == {"0001": "experts: 2 waiting"}
    beat(first, expert(0), 312)
    assert words(made) == {"0001": "experts: 1 at step 312/400, 1 waiting"}
    beat(first, expert(1), 10**9)
    assert words(made) == {"0001": "experts: 2 at step 312 to 400/400"}
    claim(first.store, expert(0))  # a new attempt, which tells nothing yet
    second = extend(made, parse_steps(("router.train.steps=400",))).run
    assert words(made)["0002"] == "router waiting"
    beat(second, ROUTER, 301)
    assert words(made) == {"0001": "experts: 2 at step 312 to 400/400", "0002": "router at step 301/400"}
    beat(second, MONOLITH, 7)
    assert words(made)["0002"] == "router at step 301/400; monolith at step 7/300"


def test_extensions_of_extensions_and_what_cannot_be_read(made: Run) -> None:
    first = extend(made, parse_steps(MORE)).run
    for job in first.experts:
        save_state(claim(first.store, job), 400, first.identity(job), {"rank-000/a": b"state"}, keep=2)
    nested = extend(first, parse_steps(("expert.train.steps=500",))).run
    broken = extend(made, parse_steps(("expert.train.steps=700",))).run
    broken.store.write(RUN_FILE, b"{")
    assert list(words(made)) == ["0001", "0001/extended/0001", "0002"]
    assert words(made)["0002"].startswith(f"{broken.url}/{RUN_FILE}: not whole")
    beat(nested, expert(1), 450)
    lines = ddm("status", made.url).splitlines()
    place = lines.index(f"  extended by {nested.url}, a run of its own: ddm status {nested.url}")
    assert lines[place + 1] == "    experts: 1 at step 450/500, 1 waiting"
    once = ddm("watch", made.url, "--once").splitlines()
    assert once[once.index(lines[place]) + 1] == lines[place + 1]


def test_status_as_json(made: Run) -> None:
    run = extend(made, parse_steps(MORE)).run
    beat(run, expert(1), 320)
    shown = json.loads(ddm("status", made.url, "--json"))
    assert (shown["run"], shown["name"], shown["base"], shown["appends"]) == (made.url, made.config.name, None, 0)
    [extension] = shown["extensions"]
    jobs = [
        {"artifact": "experts/000", "finished": False, "step": None, "steps": 400},
        {"artifact": "experts/001", "finished": False, "step": 320, "steps": 400},
    ]
    assert extension == {"url": run.url, "appends": 0, "lacks": None, "error": None, "jobs": jobs}
    states = {each["artifact"]: (each["state"], each["done"]) for each in shown["artifacts"]}
    assert states["experts/000"] == ("finished", 1.0) and states["student"] == ("waiting", 0.0)
    (Path(run.url) / RUN_FILE).write_bytes(b"{")
    [extension] = json.loads(ddm("status", made.url, "--json"))["extensions"]
    assert extension["jobs"] is None and extension["error"]["kind"] == "CorruptArtifact"


def test_appended_files_are_told_with_what_is_made_of_them(tmp_path: Path) -> None:
    base = make_base(tmp_path)
    write_digits(tmp_path / "photos", range(200, 230))
    run = append(base, {"expert": 20}).run
    untrained = "experts: 2 waiting; router waiting"
    assert words(base) == {"0001": f"30 more files, rows not made yet; {untrained}"}
    prepare(run, execute=serial)
    assert words(base) == {"0001": f"30 more files, partition not made yet; {untrained}"}
    make_data(run)
    assert words(base) == {"0001": f"30 more files, rows and partition made; {untrained}"}
    publish_models(run)
    finished = "experts: 2 finished; router finished"
    assert words(base)["0001"].startswith(f"30 more files, rows and partition made; {finished}")
    run.store.delete_one(f"{expert(1)}/{NAME}")
    beat(run, expert(1), 4)
    assert "experts: 1 finished, 1 at step 4/20; router finished" in words(base)["0001"]
    assert base.finished(PARTITION) and base.finished(ROWS)


def test_a_look_costs_the_same_however_many_objects_there_are(made: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run = extend(made, parse_steps(MORE)).run
    beat(run, expert(0), 312)
    run.store.write(f"{expert(1)}/launches/x/BEGUN-0000", b"{}")

    def cost() -> tuple[Counter[str], int]:
        """Requests by kind and bytes read, those of listings included."""
        with monkeypatch.context() as patch:
            meter = StoreMeter(patch)
            extension_statuses(made)
        return meter.requests, meter.read

    few = cost()
    for place in (f"{expert(0)}/attempts/0001/state/step-000000312", f"{expert(1)}/launches/x", "eval/demo/images"):
        folder = Path(run.url) / place
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(1200):
            (folder / f"{number:04d}").write_bytes(b"x")
    assert cost() == few and few[0]["list"] <= 8 and len(run.store.sizes("")) > 3600


def test_of_very_many_only_the_newest_are_looked_at(made: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [extend(made, parse_steps((f"expert.train.steps={steps}",))).run for steps in (400, 500, 600)]
    monkeypatch.setattr(extension_status, "MAX_READ", 2)
    assert extension_statuses(made)[0] == ExtensionStatus(runs[0].url)
    assert words(made) == {"0001": "", "0002": "experts: 2 waiting", "0003": "experts: 2 waiting"}
    assert f"extended by {runs[0].url}, a run of its own" in ddm("status", made.url)
