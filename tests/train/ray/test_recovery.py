"""Which losses of workers count as failures, whose error is told, and what ends a launch on storage that refuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from ray.exceptions import RayActorError, RaySystemError
from ray.train import ControllerError

from ddm_ray.errors import GaveUp, OutOfMemory, StorageError, TrainingError
from ddm_ray.placement import TrainPlacement
from ddm_ray.storage.graph import Artifact
from ddm_ray.storage.launches import FailureBudget, Launch
from ddm_ray.storage.store import Store
from ddm_ray.train.ray import fit, launch, recovery
from ddm_ray.train.ray.fit import FailureBudgetCallback, WorkerDrained
from ddm_ray.train.ray.launch import Supervisor
from ddm_ray.train.ray.recovery import innermost

JOB = Artifact("experts/000")


def test_losses_that_were_announced_do_not_count(tmp_path: Path) -> None:
    store, launch = Store(str(tmp_path)), Launch(JOB)
    callback = FailureBudgetCallback(FailureBudget(store.url, launch, max_failures=1))
    announced = RayActorError(error_msg="its node was taken away", preempted=True)
    lost = RuntimeError("Connection closed by peer")
    for errors in ([WorkerDrained(JOB), lost], [lost, announced], [lost], [announced]):
        callback.after_exception(None, dict(enumerate(errors)))
        assert not store.exists(launch.given_up_key)
    with pytest.raises(GaveUp, match=r"^the process was killed$"):
        callback.after_exception(None, {0: lost, 1: RayActorError(error_msg="the process was\nkilled")})
    assert json.loads(store.read(launch.given_up_key))["error"] == "the process was killed"


def test_a_controller_ends_with_what_trying_again_will_not_mend(tmp_path: Path) -> None:
    """Its neighbours under the same supervisor go on. Fewer rows at once may fit, and storage come back."""
    callback = FailureBudgetCallback(FailureBudget(str(tmp_path), Launch(JOB), max_failures=9))
    for passing in (OutOfMemory("micro_batch 8"), StorageError("away")):
        callback.after_exception(None, {0: passing})
    with pytest.raises(TrainingError, match=r"^loss nan$"):
        callback.after_exception(None, {0: RuntimeError("lost"), 1: TrainingError("loss nan")})


def test_the_innermost_error_is_told() -> None:
    outer, inner = RuntimeError("outer"), ValueError("inner")
    outer.__cause__ = inner
    group = RuntimeError("group")
    group.worker_failures = {3: outer}  # type: ignore[attr-defined]
    assert innermost(group) is innermost(inner) is inner


def test_whoever_tends_the_cluster_outlives_what_ray_raises(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds = 0

    def fail() -> None:
        nonlocal rounds
        rounds += 1
        raise SystemExit if rounds == 4 else RaySystemError("the GCS is away")

    monkeypatch.setattr(recovery, "free_places_of_the_dead", fail)
    monkeypatch.setattr(recovery, "NODES_SECONDS", 0)
    with pytest.raises(SystemExit):
        recovery.tend_cluster()
    assert capsys.readouterr().err.count("warning: the cluster can't be asked: ") == 1


@pytest.fixture
def unwritable(tmp_path: Path) -> Store:
    """Storage on which the job can be listed, but no launch can write."""
    (tmp_path / JOB).mkdir(parents=True)
    (tmp_path / JOB / "launches").write_bytes(b"")
    return Store(str(tmp_path))


def test_a_controller_ends_with_the_refusal_of_a_storage_that_takes_no_note(unwritable: Store) -> None:
    callback = FailureBudgetCallback(FailureBudget(unwritable.url, Launch(JOB), max_failures=1))
    lost = {0: RayActorError(error_msg="the process was killed")}
    callback.after_exception(None, lost)
    with pytest.raises(StorageError, match="GIVEN_UP"):
        callback.after_exception(None, lost)


@pytest.mark.parametrize(
    ("error", "fits"),
    [
        (ControllerError(StorageError("/run: no space left")), 1),  # by the controller's own count
        (ControllerError(RuntimeError("no port")), 3),
        (RayActorError(error_msg="the process was killed"), 3),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_supervisor_ends_with_it_too(
    unwritable: Store, monkeypatch: pytest.MonkeyPatch, error: Exception, fits: int
) -> None:
    calls = []

    def fail(*arguments: object) -> None:
        calls.append(arguments)
        raise error

    monkeypatch.setattr(fit, "fit", fail)
    supervisor = object.__new__(Supervisor)  # without its thread, which asks Ray for its nodes
    with pytest.raises(StorageError, match=r"no space left|GIVEN_UP"):
        supervisor.fit(unwritable.url, Launch(JOB), TrainPlacement(max_failures=2))
    assert len(calls) == fits


def test_a_supervisor_asks_again_for_what_passes_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passing, final = StorageError("no network"), StorageError("no permission", passes=False)
    answers = iter([RayActorError(error_msg="the process was killed"), passing, passing, final])

    def fail(*_: object) -> None:
        raise next(answers)

    monkeypatch.setattr(fit, "fit", fail)
    monkeypatch.setattr(launch, "AWAY_SECONDS", 0.0)
    supervisor = object.__new__(Supervisor)
    with pytest.raises(StorageError, match="no permission"):
        supervisor.fit(str(tmp_path), Launch(JOB), TrainPlacement())


def test_a_supervisor_loads_all_before_it_has_threads() -> None:
    """Two threads that import Ray Data's modules at once may each wait for the other: Python ends one of them."""
    code = """
import sys, threading
from ddm_ray.train.ray.launch import Supervisor
names = "ddm_ray.train.ray.fit", "ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator"
threading.Thread.start = lambda thread: print([name in sys.modules for name in names])
Supervisor()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[True, True]\n"
