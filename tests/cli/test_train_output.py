"""What `ddm train` prints of trainings: their rows as they go, then how they ended, and where pictures lie."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ddm_ray.cli import main
from ddm_ray.cli import train as verb
from ddm_ray.config import load_recipe
from ddm_ray.errors import TrainingError
from ddm_ray.jobs.attempts import Attempt, claim
from ddm_ray.jobs.status import Status, survey
from ddm_ray.run.graph import Artifact
from ddm_ray.run.run import Run
from tests.jobs.attempts import beat, finish
from tests.random_run import make_data


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run whose trainings take no time: each beats once, is painted, and is finished."""

    def trained(
        run: Run,
        artifacts: list[Artifact],
        site: Any,
        address: str | None,
        watch: Callable[[list[Status]], None],
        starting: Callable[[Artifact], None],
        *others: Any,
    ) -> None:
        for artifact in artifacts:
            starting(artifact)
            attempt = claim(run.store, artifact)
            beat(attempt, 1, 75)
            if artifact != "router":
                run.store.write(attempt.picture_key(60), b"png")
            watch([each for each in survey(run) if each.artifact == artifact])
            finish(run, artifact)

    monkeypatch.setattr(verb, "_train", trained)
    return make_data(str(tmp_path / "run"), num_rows=60)


def picture(run: Run, artifact: str) -> str:
    return f"{run.url}/{Attempt(run.store, artifact, 1).picture_key(60)}"


def test_one_model(run: Run) -> None:
    done = CliRunner().invoke(main, ["train", run.url, "expert", "1"])
    assert done.exit_code == 0, done.output
    log = done.stderr.splitlines()
    assert log[:2] == [
        "experts/001    0%  starting",
        f"newest picture, of experts/001 after 60 steps: {picture(run, 'experts/001')}",
    ]
    assert log[2].startswith("experts/001  100%  done")
    ended, samples, following = done.stdout.splitlines()
    assert ended.startswith("experts/001: 300 steps, loss 0.2500")
    assert (samples, following) == (
        f"its samples: {picture(run, 'experts/001')}",
        f"next: ddm train {run.url} expert 0",
    )
    again = CliRunner().invoke(main, ["train", run.url, "expert", "1"])
    assert (again.stdout, again.stderr) == (done.stdout, "")


def test_all_models(run: Run) -> None:
    finish(run, Artifact("experts/000"))
    done = CliRunner().invoke(main, ["train", run.url, "all"])
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0].startswith("experts/000: finished already, 300 steps")
    assert [line.partition(":")[0] for line in lines[1:3]] == ["experts/001", "router"]
    assert lines[3:] == [f"its samples: {picture(run, 'experts/001')}", f"next: ddm sample {run.url}"]
    again = CliRunner().invoke(main, ["train", run.url, "all"])
    assert again.stdout.splitlines()[-1] == lines[-1] and again.stdout.count("next: ") == 1
    for artifact in ("experts/001", "router"):
        assert any(line.startswith(f"{artifact:<12} 100%  done") for line in done.stderr.splitlines())


def test_models_that_a_person_accepts_have_one_next_command(run: Run, tmp_path: Path) -> None:
    by_hand = make_data(str(tmp_path / "by-hand"), settings=("acceptance=by_hand",), num_rows=60)
    done = CliRunner().invoke(main, ["train", by_hand.url, "all"])
    assert done.exit_code == 0 and done.stdout.count("ddm ") == 1, done.output
    assert done.stdout.endswith(f"next: ddm accept {by_hand.url} --all\n")
    one = CliRunner().invoke(main, ["train", by_hand.url, "router"]).stdout
    assert f"accept it with: ddm accept {by_hand.url} router\n" in one


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "has no finished partition/shards/cluster=001 yet; begin with: ddm prepare"),
        (("--islands", "none.yaml"), "none.yaml: No such file"),
        (("--island", "north"), "island north: in which file"),
    ],
)
def test_a_refused_training_has_not_failed(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    run = Run.create(str(tmp_path / "run"), load_recipe("tiny"))
    done = CliRunner().invoke(main, ["train", run.url, "expert", "1", *options])
    assert done.exit_code == 1 and done.stderr.count("\n") == 1 and message in done.stderr
    assert {status.state for status in survey(run)} == {"waiting"} and not run.store.sizes("experts")


def test_a_failure_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise TrainingError("loss nan")

    monkeypatch.setattr(verb, "_train", fails)
    done = CliRunner().invoke(main, ["train", run.url, "expert", "1"])
    assert done.exit_code == 1 and done.stderr.splitlines()[-1] == "error: loss nan" and not done.stdout
