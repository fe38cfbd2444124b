"""An expert trained on a machine that shares nothing with ours but a copy each way is the one trained here."""

from pathlib import Path

import pytest

from ddm_ray.jobs.attempts import claimed
from ddm_ray.jobs.copying import copy
from ddm_ray.jobs.published import Weights
from ddm_ray.placement import TrainPlacement
from ddm_ray.run.graph import expert, shard
from ddm_ray.run.info import TrainedInfo
from ddm_ray.run.run import Run
from ddm_ray.train import worker
from tests.train.test_worker import train_until

pytestmark = pytest.mark.contract

EXPERT = expert(1)


def report(share: float, key: str) -> None:
    """Nobody looks."""


def test_trained_elsewhere_it_has_the_same_bits(tmp_path: Path, quiet: Run, short_run: Run) -> None:
    """Though an attempt that began here has the same number."""
    away = str(tmp_path / "away/run")
    train_until(short_run, 5, EXPERT)
    copy(short_run, away, shard(1), report)
    worker.train(away, EXPERT, TrainPlacement())
    island = Run.open(away)
    assert claimed(island.store, EXPERT) == claimed(short_run.store, EXPERT) == [1]
    copy(island, short_run.url, EXPERT, report)

    names = ("ema.safetensors", "curve.safetensors", "model.json")
    files = [Weights.finished(run, EXPERT).read(run, dict.fromkeys(names, 2**30)) for run in (short_run, island, quiet)]
    assert files[0] == files[1] == files[2]
    assert short_run.require(EXPERT).identity == quiet.require(EXPERT).identity
    assert TrainedInfo.of(short_run.require(EXPERT)).step == 12
    worker.train(short_run.url, EXPERT, TrainPlacement())
    assert claimed(short_run.store, EXPERT) == [1], "it is finished here"
