"""By the commands, on a real Ray: a run of images, one that appends more to it, one that begins with its weights."""

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from ddm_ray.cli import main
from ddm_ray.jobs.published import Weights
from ddm_ray.run.graph import PARTITION, ROUTER, ROWS, expert
from ddm_ray.run.info import RowsInfo, TrainedInfo
from ddm_ray.run.run import Run
from ddm_ray.sampling.run_models import load_network
from ddm_ray.train.job import train_job
from ddm_ray.train.teachers import first_model
from tests.data.appended import sums, write_digits
from tests.train.conftest import SHORT

pytestmark = pytest.mark.chaos


def call(*words: str) -> str:
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, f"{words}\n{done.output[-3000:]}"
    return done.output


def test_a_run_is_trained_appended_to_and_begun_with(
    ray_cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_digits(tmp_path / "photos", range(150))
    settings = [word for setting in (*SHORT, "data.source=photos") for word in ("--set", setting)]
    call("init", "first", "--recipe", "tiny", *settings)
    call("prepare", "first")
    call("partition", "first")
    call("train", "first", "all")
    base = Run.open("first")
    before = sums(base)

    write_digits(tmp_path / "photos", range(150, 200))
    fewer = ["--set", "expert.train.steps=6", "--set", "router.train.steps=4"]
    printed = call("init", "more", "--from", "first", "--append", *fewer)
    assert "50 new files" in printed and "next: ddm prepare more" in printed
    call("prepare", "more")
    fit = call("partition", "more")
    assert "cluster 0: " in fit and "new training rows" in fit
    call("train", "more", "all")
    run = Run.open("more")
    assert RowsInfo.of(run.require(ROWS)).rows == 50 and run.finished(PARTITION)
    assert [TrainedInfo.of(run.require(job)).step for job in (*run.experts, ROUTER)] == [6, 6, 4]
    call("sample", "more", "--num", "1", "--out", "more.png")
    call("evaluate", "more")
    with Image.open("more.png") as grid:
        assert grid.width > 8
    assert f"derived from {base.url}" in call("status", "more")
    assert f"{run.url} was derived from it" in call("status", "first")
    assert sums(base) == before
    call("sample", "first", "--num", "1", "--out", "first.png")

    own = ["--set", "expert.train.init_from={source: first, network: own}"]
    call("init", "begun", "--recipe", "tiny", *settings, *own)
    call("prepare", "begun")
    call("partition", "begun")
    begun = Run.open("begun")
    trained = load_network(base, Weights.finished(base, expert(1))).state_dict()
    begins = first_model(begun, train_job(begun, expert(1))).state_dict()
    assert all(torch.equal(begins[name], tensor) for name, tensor in trained.items())
    call("train", "begun", "expert", "1")
    assert TrainedInfo.of(begun.require(expert(1))).step == 12 and sums(base) == before
