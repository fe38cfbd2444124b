"""Which losses of workers count as failures, whose error is told, and what ends a launch on storage that refuses."""

import json
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path

import pytest
from ray.exceptions import RayActorError
from ray.train import ControllerError
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError

from ddm_ray import ray_session
from ddm_ray.config import load_recipe
from ddm_ray.errors import GaveUp, OutOfMemory, StorageError, TrainingError
from ddm_ray.placement import TrainPlacement
from ddm_ray.storage.graph import Artifact
from ddm_ray.storage.launches import FailureBudget, Launch
from ddm_ray.storage.run import Run
from ddm_ray.storage.store import Store
from ddm_ray.train.ray import driver, fit, recovery
from ddm_ray.train.ray.fit import FailureBudgetCallback
from ddm_ray.train.ray.leaving import WorkerDrained
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


@pytest.fixture
def run_url(tmp_path: Path) -> str:
    """A run of which nothing is made."""
    return Run.create(str(tmp_path / "run"), load_recipe("tiny")).url


@pytest.fixture
def unwritable(run_url: str) -> Store:
    """The storage of a run whose job can be listed, but no launch can write."""
    store = Store(run_url)
    store.write(f"{JOB}/launches", b"")
    return store


def test_a_controller_ends_with_the_refusal_of_a_storage_that_takes_no_note(unwritable: Store) -> None:
    callback = FailureBudgetCallback(FailureBudget(unwritable.url, Launch(JOB), max_failures=1))
    lost = {0: RayActorError(error_msg="the process was killed")}
    callback.after_exception(None, lost)
    with pytest.raises(StorageError, match="GIVEN_UP"):
        callback.after_exception(None, lost)


class Failing:
    """In place of a trainer: `fit` raises one error after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, errors: Iterable[Exception]):
        self.fits, self._errors = 0, iter(errors)
        monkeypatch.setattr(fit, "trainer", lambda *_: self)
        monkeypatch.setattr(ray_session, "ray_job", lambda *_: nullcontext())
        monkeypatch.setattr(recovery, "cancel_reservation", lambda _: None)
        monkeypatch.setattr(driver, "AWAY_SECONDS", 0.0)

    def fit(self) -> None:
        self.fits += 1
        for error in self._errors:
            raise error


KILLED = RayActorError(error_msg="the process was killed")


@pytest.mark.parametrize(
    ("error", "fits"),
    [
        (ControllerError(StorageError("/run: no space left")), 1),  # by the controller's own count
        (ControllerError(RuntimeError("no port")), 3),
        (KILLED, 3),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_driver_ends_with_it_too(
    unwritable: Store, monkeypatch: pytest.MonkeyPatch, error: Exception, fits: int
) -> None:
    failing = Failing(monkeypatch, [error] * 5)
    with pytest.raises(StorageError, match=r"no space left|GIVEN_UP"):
        driver.train_to_the_end("head:6379", unwritable.url, Launch(JOB), TrainPlacement(max_failures=2))
    assert failing.fits == fits


def test_a_driver_asks_again_for_what_passes_alone(monkeypatch: pytest.MonkeyPatch, run_url: str) -> None:
    passing, final = StorageError("no network"), StorageError("no permission", passes=False)
    failing = Failing(monkeypatch, [KILLED, passing, passing, final])
    with pytest.raises(StorageError, match="no permission"):
        driver.train_to_the_end("head:6379", run_url, Launch(JOB), TrainPlacement())
    assert failing.fits == 4


def test_a_cluster_without_room_is_no_failure(monkeypatch: pytest.MonkeyPatch, run_url: str) -> None:
    """Ray's own error, by the name that it has in the version that is installed."""
    no_room = ControllerError(WorkerGroupStartupTimeoutError(num_workers=2))
    failing = Failing(monkeypatch, [no_room] * 5)
    driver.train_to_the_end("head:6379", run_url, Launch(JOB), TrainPlacement(max_failures=1))
    assert failing.fits == 6
