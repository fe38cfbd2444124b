"""The held-out loss while training: it is what it says, disturbs nothing, and is the same whoever measures it."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddm_ray.config import load_recipe
from ddm_ray.core.flow import interpolate
from ddm_ray.data.loading.heldout_rows import heldout_rows
from ddm_ray.data.loading.loader import load_rows
from ddm_ray.data.schema import HELDOUT
from ddm_ray.errors import OutOfMemory, Preempted
from ddm_ray.jobs.attempts import Attempt
from ddm_ray.jobs.describe import describe
from ddm_ray.jobs.status import status
from ddm_ray.models import weights
from ddm_ray.placement import TrainPlacement
from ddm_ray.run.graph import MONOLITH, ROUTER, STUDENT, Artifact, expert, shard
from ddm_ray.run.info import HeldoutInfo, ShardInfo, TrainedInfo
from ddm_ray.run.manifest import Identity, Manifest
from ddm_ray.run.run import Run
from ddm_ray.store.store import Store
from ddm_ray.train import worker
from ddm_ray.train.heldout import (
    FORWARD,
    GROUPS,
    LOSSES,
    SHARE,
    STEPS,
    HeldoutLoss,
    Schedule,
    last_measured,
    measured_curve,
    measurements,
)
from ddm_ray.train.job import train_job
from tests.infos import info_of
from tests.random_run import make_data, make_run
from tests.train.background import Background
from tests.train.conftest import SHORT
from tests.train.results import curve_of, difference, weights_of

pytestmark = pytest.mark.contract

EXPERT = expert(1)
FEW, NONE = {"heldout_rows": 8}, {"heldout_rows": 0}
"""Rows of which runs so short are measured several times, and never."""


def losses_of(run: Run, artifact: Artifact) -> dict[int, list[float]]:
    """Losses by groups of rows, by the steps after which they were measured."""
    curve = curve_of(run, artifact)
    return dict(zip(curve[STEPS].int().tolist(), curve[LOSSES].view(-1, GROUPS).tolist(), strict=True))


def same_training(a: Run, b: Run, artifact: Artifact) -> bool:
    """True if weights, each step's loss and its gradient norm are equal to the bit."""
    curves = [{name: curve_of(run, artifact)[name] for name in ("loss", "grad_norm")} for run in (a, b)]
    return difference(*curves) == 0 and difference(weights_of(a, artifact), weights_of(b, artifact)) == 0


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize(
    ("artifact", "stage", "precision"),
    [(EXPERT, 0, "fp32"), (EXPERT, 1, "bf16"), (EXPERT, 3, "bf16"), (ROUTER, 1, "fp32"), (MONOLITH, 1, "fp32")],
)
def test_what_is_trained_is_the_same_with_it_and_without(
    tmp_path: Path, artifact: Artifact, stage: int, precision: str
) -> None:
    settings = (*SHORT, *(f"{part}.train.precision={precision}" for part in ("expert", "router")))
    measured, unmeasured = (make_data(str(tmp_path / name), settings=settings) for name in ("with", "without"))
    worker.train(measured.url, artifact, TrainPlacement(zero_stage=stage, **FEW))
    worker.train(unmeasured.url, artifact, TrainPlacement(zero_stage=stage, **NONE))
    assert same_training(measured, unmeasured, artifact)
    assert [*losses_of(measured, artifact)] == {EXPERT: [8, 12], ROUTER: [5, 10, 12], MONOLITH: [4, 8, 12]}[artifact]
    assert STEPS not in curve_of(unmeasured, artifact)
    assert TrainedInfo.of(unmeasured.require(artifact)).heldout is None
    assert "heldout" not in unmeasured.require(artifact).info


@pytest.mark.usefixtures("world_of_one")
def test_who_leaves_where_it_is_due_leaves_no_gap(tmp_path: Path) -> None:
    left, undisturbed = (make_data(str(tmp_path / name), settings=SHORT) for name in ("left", "undisturbed"))
    calls = iter(range(1, 100))
    with pytest.raises(Preempted, match="step 8 is saved"):
        worker.train(left.url, EXPERT, TrainPlacement(**FEW), notice=lambda: next(calls) == 8)
    for run in (left, undisturbed):
        worker.train(run.url, EXPERT, TrainPlacement(**FEW))
    assert [*losses_of(undisturbed, EXPERT)] == [8, 12]
    assert losses_of(left, EXPERT) == losses_of(undisturbed, EXPERT)


@pytest.mark.parametrize(
    ("world", "stage", "precision"), [(2, 3, "bf16"), pytest.param(3, 2, "bf16", marks=pytest.mark.chaos)]
)
def test_several_ranks_train_the_same_with_it_and_without(
    tmp_path: Path, world: int, stage: int, precision: str
) -> None:
    """Short experts trained by several real ranks over gloo."""
    cases: dict[str, Any] = {
        name: {
            "settings": [*SHORT, f"expert.train.precision={precision}"],
            "legs": [{"world": world, "zero_stage": stage, **fields}],
        }
        for name, fields in (("with", FEW), ("without", NONE))
    }
    Background("ranks", str(tmp_path), json.dumps(cases)).finish()
    measured, unmeasured = (Run.open(str(tmp_path / name)) for name in cases)
    assert same_training(measured, unmeasured, EXPERT)
    assert [*losses_of(measured, EXPERT)] == [8, 12]


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("artifact", [EXPERT, MONOLITH])
def test_it_is_the_loss_of_the_published_weights_on_held_out_rows(short_run: Run, artifact: Artifact) -> None:
    """Computed once more: of the published file, by its own network, on rows that are read in another way."""
    worker.train(short_run.url, artifact, TrainPlacement(micro_batch=5))
    job = train_job(short_run, artifact)
    schedule = Schedule.of(job, TrainPlacement())
    assert schedule is not None
    every = load_rows(short_run, job.shards, HELDOUT)
    kept = heldout_rows(short_run, job.shards, schedule.draws, None)
    assert 0 < len(kept.cluster_N) <= len(every)
    known = {row.tobytes(): place for place, row in enumerate(every.data_NCHW.numpy())}
    row_R = torch.tensor([known[row.tobytes()] for row in kept.modelled()])
    assert len(set(row_R.tolist())) == len(row_R), "no row comes twice"
    assert (kept.cluster_N == every.cluster_N[row_R].numpy()).all()
    assert (kept.condition() == every.label_N[row_R]).all()  # type: ignore[union-attr, operator]

    network = weights.load_model(
        job.spec, short_run.read(artifact, f"{short_run.require(artifact).info['weights']}/ema.safetensors")
    )
    measuring = HeldoutLoss(job, schedule, kept, 7)
    draws = [(own, batch) for own, batch in measuring._batches()]
    assert sum(len(own) for own, _ in draws) == schedule.draws
    error_D = torch.zeros(schedule.draws)
    with torch.no_grad():
        for own, batch in draws:
            x = interpolate(batch.data_BCHW, batch.noise_BCHW, batch.t_B)
            wrong = network(x, batch.t_B, batch.condition) - (batch.noise_BCHW - batch.data_BCHW)
            error_D[own.start : own.stop] = wrong.square().flatten(1).mean(1)[: len(own)]
    group_D = torch.arange(schedule.draws) % len(row_R) % GROUPS
    expected = [float(error_D[group_D == group].mean()) for group in range(GROUPS)]
    assert losses_of(short_run, artifact)[12] == pytest.approx(expected, rel=1e-5)
    # Times are spread evenly, one in each equal part of [0, 1].
    t_D = torch.cat([batch.t_B[: len(own)] for own, batch in draws])
    assert (t_D.sort().values * schedule.draws).int().tolist() == [*range(schedule.draws)]


@pytest.mark.usefixtures("world_of_one")
def test_it_is_told_while_training_and_at_the_end(short_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    beat = Attempt.beat
    monkeypatch.setattr(Attempt, "beat", lambda attempt, progress: (seen.append(progress), beat(attempt, progress))[1])
    worker.train(short_run.url, EXPERT, TrainPlacement(**FEW))
    losses = losses_of(short_run, EXPERT)
    info = TrainedInfo.of(short_run.require(EXPERT)).heldout
    assert info is not None and info.loss == pytest.approx(np.mean(losses[12]))
    assert info.error == pytest.approx(np.std(losses[12], ddof=1) / GROUPS**0.5)
    assert info.step == 12
    last = seen[-1]
    assert (last["heldout_step"], last["heldout_loss"]) == (12, pytest.approx(info.loss))
    text = describe(status(short_run, EXPERT))
    assert f", held out {info.loss:.4f} (EMA weights), " in text


@pytest.mark.usefixtures("world_of_one")
def test_running_out_of_memory_while_measuring_is_blamed_on_the_micro_batch(
    short_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def takes_all(*_: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    monkeypatch.setattr(HeldoutLoss, "measure", takes_all)
    with pytest.raises(OutOfMemory, match=r"^micro_batch [0-9]+: .*2 GiB"):
        worker.train(short_run.url, EXPERT, TrainPlacement(**FEW))


@pytest.mark.parametrize("last", [[math.nan] * GROUPS, [1.0] * (GROUPS - 1) + [math.inf], [1.0] * 7])
def test_what_was_not_measured_soundly_is_left_out(last: list[float]) -> None:
    assert last_measured({"loss": [1.0] * 9, STEPS: [3.0, 6.0], LOSSES: [1.0] * GROUPS + last}) is None
    assert last_measured({"loss": [1.0] * 9}) is None
    assert measurements({STEPS: [3.0], LOSSES: [1.0] * 7}) == ([], [])


def test_a_record_without_measurements_is_that_of_older_versions() -> None:
    """And one of those that had more of them is read, without what they added."""
    plain, measured = (info_of(ROUTER, heldout=each) for each in (None, HeldoutInfo(step=300, loss=0.5, error=0.01)))
    assert "heldout" not in plain.as_json()
    assert measured.as_json()["heldout"] == {"step": 300, "loss": 0.5, "error": 0.01}
    more = {**measured.as_json()["heldout"], "since": 225, "fall": 0.2, "lowest": 300, "initial": 0.0}
    for info, fields in ((plain, plain.as_json()), (measured, {**measured.as_json(), "heldout": more})):
        manifest = Manifest(ROUTER, Identity({}), {}, json.loads(json.dumps(fields)))
        assert TrainedInfo.of(manifest) == info


@pytest.mark.usefixtures("world_of_one")
def test_why_no_held_out_loss_is_measured_is_told_and_changes_nothing(
    tmp_path: Path, short_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []
    beat = Attempt.beat
    monkeypatch.setattr(Attempt, "beat", lambda attempt, progress: (seen.append(progress), beat(attempt, progress))[1])
    run = make_data(str(tmp_path / "few"), settings=SHORT, num_rows=60)
    count = ShardInfo.of(run.require(shard(1))).rows_heldout
    assert count < GROUPS
    worker.train(run.url, EXPERT, TrainPlacement())
    assert seen[-1]["unmeasured"] == f"its shards have {count} held-out rows, and fewer than 8 tell nothing"
    assert STEPS not in curve_of(run, EXPERT)
    text = describe(status(run, EXPERT))
    assert f"no held-out loss: its shards have {count} held-out rows, and fewer than 8 tell nothing, " in text
    # A file that no step needs is damaged.
    path = Path(short_run.url) / shard(1) / "heldout-00000.parquet"
    path.write_bytes(path.read_bytes()[:-9])
    worker.train(short_run.url, EXPERT, TrainPlacement())
    assert str(path) in seen[-1]["unmeasured"] and STEPS not in curve_of(short_run, EXPERT)


@pytest.mark.usefixtures("world_of_one")
def test_of_a_student_it_is_the_loss_of_the_data_unless_its_teacher_is_guided(tmp_path: Path) -> None:
    settings = ("student.train={steps: 8, batch: 8}", "expert.train.condition_dropout=0.1")
    run = make_run(str(tmp_path / "run"), settings=settings, num_rows=400)
    worker.train(run.url, STUDENT, TrainPlacement(**FEW))
    assert [*losses_of(run, STUDENT)] == [6, 8]
    guided = make_run(str(tmp_path / "guided"), settings=(*settings, "student.guidance_scale=1.5"), num_rows=400)
    worker.train(guided.url, STUDENT, TrainPlacement())
    assert STEPS not in curve_of(guided, STUDENT)


# Of no run on storage: a job follows from the configuration alone.
JOB = train_job(Run(Store("nowhere"), load_recipe("tiny")), MONOLITH)


@given(steps=st.integers(1, 3000), batch=st.integers(1, 512), rows=st.integers(8, 1024))
def test_it_costs_a_bounded_share_on_a_grid_that_longer_trainings_have_too(steps: int, batch: int, rows: int) -> None:
    def schedule_of(total: int) -> Schedule:
        train = JOB.train.model_copy(update={"steps": total, "batch": batch})
        schedule = Schedule.of(replace(JOB, train=train), TrainPlacement(heldout_rows=rows))
        assert schedule is not None
        return schedule

    schedule, longer = schedule_of(steps), schedule_of(2 * steps + 1)
    due = [step for step in range(1, steps + 1) if schedule.due(step)]
    assert due[-1] == steps
    assert [step for step in due if step < steps] == [step for step in range(1, steps) if longer.due(step)]
    # All but the last one, which every training has.
    assert FORWARD * schedule.draws * (len(due) - 1) <= SHARE * steps * batch
    if steps >= 8 * schedule.first:  # a quarter has a measurement near its beginning
        assert min(abs(step - 0.75 * steps) for step in due) <= 0.1 * steps
        assert len(due) <= 12 + 4 * math.log2(steps / schedule.first)


def test_measurements_off_the_grid_or_of_other_draws_are_not_gone_on_with() -> None:
    schedule = Schedule(first=3, draws=16, steps=24)
    rows = [(step, [float(step)] * GROUPS) for step in (3.0, 6.0, 8.0)]
    curve = measured_curve(16, rows)
    assert schedule.kept(curve) == measured_curve(16, [rows[0], rows[1]])
    assert schedule.kept(measured_curve(17, rows)) == schedule.kept({"loss": [1.0]}) == {}
    assert replace(schedule, steps=8).kept(curve) == curve
