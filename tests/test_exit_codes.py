"""Exit codes by which whoever starts commands knows what to do: done, again later, or never."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from ddm_ray import errors
from ddm_ray.cli import main
from ddm_ray.config import load_recipe
from ddm_ray.errors import DDMError
from ddm_ray.exit_codes import exit_code
from ddm_ray.run.graph import Artifact
from ddm_ray.run.run import Run
from tests.conftest import ddm
from tests.jobs.attempts import finish

pytestmark = pytest.mark.contract

AGAIN = {"StorageError", "RayAway", "GaveUp", "Preempted", "Overtaken", "Left", "InTraining"}
KINDS = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, DDMError)}


@pytest.mark.parametrize("name", KINDS)
def test_the_type_of_an_error_says_whether_it_may_pass(name: str) -> None:
    """Also of one that came over a border as JSON, as that of a launch that gave up."""
    again = DDMError.from_fields(json.loads(json.dumps(KINDS[name]("x").to_fields())))
    assert {exit_code(error) for error in (KINDS[name]("x"), again)} == {75 if name in AGAIN else 1}


def test_errors_of_the_system() -> None:
    assert exit_code(ConnectionRefusedError()) == exit_code(TimeoutError()) == 75
    assert exit_code(FileNotFoundError()) == exit_code(ModuleNotFoundError()) == 1


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run whose router is finished, and nothing else."""
    run = Run.create(str(tmp_path / "run"), load_recipe("tiny"))
    finish(run, Artifact("router"))
    return run


@pytest.mark.parametrize(
    ("arguments", "code"),
    [("router", 0), ("expert 0 --address 127.0.0.1:1", 1), ("monolith --island lab", 1), ("teacher", 2), ("--soon", 2)],
)
def test_train_exits_with(run: Run, arguments: str, code: int) -> None:
    """What is finished; an input that isn't; an island of no file; what can't be read."""
    done = CliRunner().invoke(main, ["train", run.url, *arguments.split()])
    assert done.exit_code == code, done.stderr
    assert "exit code" not in done.stderr and "Traceback" not in done.stderr


@pytest.mark.chaos
def test_train_is_to_be_tried_again_while_storage_is_away() -> None:
    away = {"AWS_ENDPOINT_URL": "http://127.0.0.1:1", "AWS_ALLOW_HTTP": "true", "AWS_ACCESS_KEY_ID": "a"}
    done = ddm("train", "s3://lab/run", "expert", "0", timeout=60, AWS_SECRET_ACCESS_KEY="b", **away)
    assert done.returncode == 75, done.stderr
    assert done.stderr.endswith("(exit code 75: the same command may work later)\n") and "Traceback" not in done.stderr


@pytest.mark.contract
def test_a_python_without_docstrings_is_refused() -> None:
    """As PYTHONOPTIMIZE=2 makes it: Ray Data fails as it is imported."""
    done = ddm("recipes", PYTHONOPTIMIZE="2")
    assert (done.returncode, done.stdout) == (1, "")
    assert "error: Ray can't be loaded without docstrings; leave out -OO" in done.stderr
