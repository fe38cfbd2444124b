"""A reporter counts steps, beats with what they come to, and says when states aren't saved."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ddm_ray.errors import TrainingError
from ddm_ray.jobs.attempts import Attempt, claim
from ddm_ray.run.graph import Artifact
from ddm_ray.run.run import Run
from ddm_ray.train.job import train_job
from ddm_ray.train.meter import Meter
from ddm_ray.train.reporter import Reporter
from ddm_ray.train.state import TrainProgress
from ddm_ray.train.step_sync import Agreed, Flags, StepResult
from tests.train.test_telemetry import curves

EXPERT = Artifact("experts/001")


def meter(run: Run) -> Meter:
    progress = TrainProgress(0, 0.0, {"loss": [], "grad_norm": []})
    return Meter(train_job(run, EXPERT), progress, torch.device("meta"), 1)


def agreed(*steps: int, loss: float = 0.5) -> Agreed:
    return Agreed(tuple(StepResult(step, loss + step, 2.0) for step in steps), Flags())


def test_it_counts_every_step_and_beats_with_the_last(short_run: Run) -> None:
    attempt = claim(short_run.store, EXPERT)
    with Reporter(attempt, {"host": "north"}, SimpleNamespace(unsaved="")) as reporter:
        reporter.begin(meter(short_run))
        reporter.after(1, agreed(0))
        reporter.after(3, agreed(1, 2))
        reporter.meter.add_heldout(8, [0.25] * 8)
        reporter.report()
        progress = reporter.meter.progress()
    assert (progress.step, [*progress.curve["loss"]]) == (3, [0.5, 1.5, 2.5])
    last = attempt.last_beat()
    assert (last["phase"], last["step"], last["loss"], last["host"]) == ("leaving", 3, 1.5, "north")
    assert last["heldout_loss"] == 0.25
    points = curves(short_run.store, attempt.prefix)
    assert (points["loss"][0], points["loss"][-1]) == ((1, 0.5), (3, 1.5)) and points["heldout_loss"] == [(3, 0.25)]


def test_states_that_cannot_be_saved_are_reported_at_once(short_run: Run) -> None:
    attempt, states = claim(short_run.store, EXPERT), SimpleNamespace(unsaved="")
    with Reporter(attempt, {}, states) as reporter:
        reporter.begin(meter(short_run))
        reporter.after(1, agreed(0))
        states.unsaved = "the disk is full"
        assert reporter.has_unreported_failure
        reporter.after(2, agreed(1))
        assert not reporter.has_unreported_failure
    assert attempt.last_beat()["unsaved"] == "the disk is full"


def test_a_loss_that_is_not_finite_ends_training(short_run: Run, tmp_path: Path) -> None:
    with Reporter(None, {}, SimpleNamespace(unsaved="")) as reporter:
        reporter.begin(meter(short_run))
        with pytest.raises(TrainingError, match=r"loss nan with gradient norm 2.0 at step 4"):
            reporter.after(5, agreed(4, loss=math.nan))


def test_other_ranks_count_and_say_nothing(short_run: Run) -> None:
    with Reporter(None, {}, SimpleNamespace(unsaved="")) as reporter:
        reporter.say("compiling")
        reporter.begin(meter(short_run))
        reporter.after(1, agreed(0))
        assert reporter.meter.done == 1 and not reporter.has_unreported_failure
    assert Attempt(short_run.store, EXPERT, 1).last_beat() == {}
