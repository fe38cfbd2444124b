"""When a failing job is given up, which failures count, and what of Ray's private side is built upon."""

import inspect
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.data._internal.cluster_autoscaler import default_autoscaling_coordinator
from ray.exceptions import RayActorError
from ray.train.v2._internal.execution.callback import ControllerCallback
from ray.train.v2._internal.execution.context import PreemptionContext, TrainRunContext
from ray.train.v2._internal.execution.scaling_policy import scaling_policy

from ddm_ray.errors import CorruptArtifact, TrainingError
from ddm_ray.placement import Placement
from ddm_ray.storage.attempts import OUT_OF_MEMORY, Attempt, claim
from ddm_ray.storage.run import Run
from ddm_ray.storage.store import Store
from ddm_ray.train.fit import Farewell, Left, Patience
from ddm_ray.train.launch import _Job
from ddm_ray.train.recovery import COORDINATOR, Streak, innermost, last_saved
from tests.random_run import make_data

JOB = "experts/000"
MARKER = f"{JOB}/attempts/_ray/x/FAILED"


def save(store: Store, attempt: int, step: int, committed: bool = True) -> None:
    folder = f"{JOB}/attempts/{attempt:04d}/state/step-{step:09d}"
    store.write(f"{folder}/state.safetensors", b"")
    if committed:
        store.write(f"{folder}/_MANIFEST.json", b"{}")


def test_the_newest_state_is_of_the_newest_attempt_that_committed_one(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    assert last_saved(store, JOB) == (0, 0)
    for _ in range(3):
        claim(store, JOB)
    save(store, 1, 900)
    save(store, 2, 40)
    save(store, 2, 50)
    save(store, 2, 60, committed=False)
    assert last_saved(store, JOB) == (2, 50)


@settings(deadline=None)
@given(saves=st.lists(st.booleans(), max_size=12), most=st.integers(0, 4))
def test_only_failures_in_a_row_without_a_new_state_are_too_many(
    tmp_path_factory: pytest.TempPathFactory, saves: list[bool], most: int
) -> None:
    store = Store(str(tmp_path_factory.mktemp("streak")))
    streak, row = Streak(store.url, JOB, most), 0
    for number, saved in enumerate(saves, start=1):
        claim(store, JOB)
        if saved:
            save(store, number, 10 * number)
        row = 1 if saved else row + 1
        assert streak.too_long() == (row > most)


def test_running_out_of_memory_does_not_count_while_fewer_rows_can_be_taken(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    streak = Streak(store.url, JOB, 0)
    for rows in (4, 2):
        claim(store, JOB).fail({"error": "no memory", "kind": OUT_OF_MEMORY, "final": False, "micro_batch": rows})
        assert not streak.too_long()
        assert streak.too_long(), "once each: workers that die without an attempt run out of nothing"
        streak = Streak(store.url, JOB, 0)
    claim(store, JOB).fail({"error": "no memory", "kind": OUT_OF_MEMORY, "final": False, "micro_batch": 1})
    assert streak.too_long()


def test_losses_that_were_announced_do_not_count(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    patience = Patience(store.url, JOB, MARKER, most=1)
    announced = RayActorError(error_msg="its node was taken away", preempted=True)
    lost = RuntimeError("Connection closed by peer")
    for errors in ([Left(JOB), lost], [lost, announced], [lost], [announced]):
        patience.after_exception(None, dict(enumerate(errors)))
        assert not store.exists(MARKER)
    patience.after_exception(None, {0: lost, 1: RayActorError(error_msg="the process was\nkilled")})
    assert store.read(MARKER) == b"the process was killed"


@pytest.fixture
def job(tmp_path: Path) -> _Job:
    run = make_data(str(tmp_path / "run"), num_rows=40)
    claim(run.store, JOB)
    write_failure(run, 1, final=True)
    return _Job(run, JOB, Placement())


def write_failure(run: Run, attempt: int, final: bool, kind: str = "CorruptArtifact") -> None:
    said = {"error": "rows are cut", "kind": kind, "final": final}
    run.store.write(f"{Attempt(run.store, JOB, attempt).prefix}/FAILED", json.dumps(said).encode())


def test_what_an_attempt_says_is_final_ends_the_job(job: _Job) -> None:
    assert job.given_up() is None  # that attempt was another launch's
    ours = {"launch": job._marker}
    claim(job.run.store, JOB, ours)
    assert job.given_up() is None
    write_failure(job.run, 2, final=False)
    assert job.given_up() is None
    claim(job.run.store, JOB, {"launch": "another"})
    write_failure(job.run, 3, final=True)
    assert job.given_up() is None, "another launch may lack what this one has"
    claim(job.run.store, JOB, ours)
    write_failure(job.run, 2, final=True)
    error = job.given_up()
    assert type(error) is CorruptArtifact and str(error) == f"{JOB}: rows are cut"
    write_failure(job.run, 2, final=True, kind="OutOfMemoryError")
    assert type(job.given_up()) is TrainingError


def test_the_innermost_error_is_told() -> None:
    outer, inner = RuntimeError("outer"), ValueError("inner")
    outer.__cause__ = inner
    group = RuntimeError("group")
    group.worker_failures = {3: outer}  # type: ignore[attr-defined]
    assert innermost(group) is innermost(inner) is inner


def test_what_is_private_to_ray_is_still_there() -> None:
    """Without it jobs train all the same, but slower to shrink, to grow and to start again."""
    actor = default_autoscaling_coordinator._AutoscalingCoordinatorActor
    assert {"requester_id", "recompute"} <= inspect.signature(actor.get_reserved_resources).parameters.keys()
    assert "requester_id" in inspect.signature(actor.cancel_request).parameters
    create = inspect.getsource(default_autoscaling_coordinator.get_or_create_autoscaling_coordinator)
    assert f'name="{COORDINATOR}"' in create and f'namespace="{COORDINATOR}"' in create
    assert 'f"train-{train_run_context.run_id}"' in inspect.getsource(scaling_policy)
    assert "run_id" in TrainRunContext.__dataclass_fields__
    assert "preemption_info" in PreemptionContext.__dataclass_fields__
    hooks = {name for name in vars(Farewell) if not name.startswith("_")}
    assert all(hasattr(ControllerCallback, name) or "worker_group" in name for name in hooks)
