"""Which losses of workers count as failures, which error is told, and what ends a launch on storage that refuses."""

import json
import os
import signal
import subprocess
import sys
from functools import partial
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from ray.exceptions import OutOfMemoryError, RayActorError
from ray.train import ControllerError
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError

from ddm_ray.config import load_recipe
from ddm_ray.errors import GaveUp, OutOfMemory, RayAway, StorageError, TrainingError
from ddm_ray.jobs.launches import FailureBudget, Launch
from ddm_ray.placement import TrainPlacement
from ddm_ray.run.graph import Artifact
from ddm_ray.run.run import Run
from ddm_ray.store.store import Store
from ddm_ray.train.ray import driver
from ddm_ray.train.ray.driver import Driver, TryResult
from ddm_ray.train.ray.fit import FailureBudgetCallback
from ddm_ray.train.ray.leaving import WorkerDrained
from ddm_ray.train.ray.losses_of_workers import found_no_room, innermost, reason_of_loss
from tests.processes import forked

pytestmark = pytest.mark.integration

JOB = Artifact("experts/000")
# Ray's ids are random: in processes that are forked from one that has drawn some, the next ones are the same.
TWO_FORKED = """
import ddm_ray.train.ray.preloaded, os, ray
ids = []
for _ in range(2):
    reader, writer = os.pipe()
    if not (pid := os.fork()):
        os.write(writer, ray.WorkerID.from_random().binary())
        os._exit(0)
    os.waitpid(pid, 0)
    ids.append(os.read(reader, 100))
print(len(set(ids)))
"""


def test_drivers_do_not_share_random_numbers() -> None:
    done = subprocess.run([sys.executable, "-c", TWO_FORKED], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "2", done.stderr


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
    """Its neighbours of the same command go on. Fewer rows at once may fit, and storage come back."""
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


def test_a_full_memory_is_told_by_its_figures() -> None:
    killed = OutOfMemoryError(
        "Memory on the node (IP: 10.0.0.7, ID: ab) was 21.85GB used / 23.00GB limit (0.950). Refer to the documentation"
    )
    why = reason_of_loss(killed)
    assert why == "Ray killed a worker: its machine's memory was full, 21.85 of 23.00 GB with all other programs"


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


def fail(errors: Path, link: Connection) -> None:
    """In place of training: send, or die of, the next line of a file of what is to go wrong."""
    first, *left = errors.read_text().splitlines()
    errors.write_text("\n".join(left))
    results = {
        "no room": TryResult(lost=""),
        "lost": TryResult(lost="the process was killed"),
        "away": TryResult(RayAway("no Ray")),
        "done": TryResult(),
    }
    if first == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    link.send(results[first])


def drive(run_url: str, errors: list[str], monkeypatch: pytest.MonkeyPatch, max_failures: int = 3) -> Driver:
    """A driver that has ended, after tries that ended so, one after the other."""
    script = Path(run_url) / "errors"
    script.write_text("\n".join(errors))
    process = partial(forked().Process, daemon=True)
    monkeypatch.setattr(
        driver._context, "Process", lambda target, args, daemon: process(target=fail, args=(script, args[-1]))
    )
    driving = Driver("head:6379", run_url, Launch(JOB), TrainPlacement(max_failures=max_failures))
    while not driving.ended():
        connection.wait([driving.sentinel])
    assert script.read_text() == "", "all were tried"
    return driving


@pytest.mark.parametrize("loss", ["lost", "killed"])
def test_losses_of_what_drives_spend_the_budget(run_url: str, monkeypatch: pytest.MonkeyPatch, loss: str) -> None:
    error = drive(run_url, [loss] * 2, monkeypatch, max_failures=1).error()
    assert isinstance(error, GaveUp) and "killed" in str(error)
    assert drive(run_url, [loss, "done"], monkeypatch, max_failures=1).error() is None


def test_a_driver_ends_with_the_refusal_of_a_storage_that_takes_no_note(
    unwritable: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = drive(unwritable.url, ["lost", "lost"], monkeypatch, max_failures=1).error()
    assert isinstance(error, StorageError) and "GIVEN_UP" in str(error)


def test_a_driver_ends_with_the_error_of_a_try(run_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(drive(run_url, ["lost", "away"], monkeypatch, max_failures=9).error(), RayAway)


def test_a_cluster_without_room_is_no_failure(run_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told by Ray's own error, by the name that it has in the version that is installed."""
    assert found_no_room(ControllerError(WorkerGroupStartupTimeoutError(num_workers=2)))
    assert not found_no_room(ControllerError(RuntimeError("no port")))
    assert drive(run_url, ["no room"] * 2 + ["done"], monkeypatch, max_failures=1).error() is None
