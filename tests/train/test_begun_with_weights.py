"""A training that begins with trained weights: with just those, and interrupted it ends with the same bits."""

from itertools import count
from pathlib import Path
from shutil import copytree, rmtree

import pytest
import torch

from ddm_ray.errors import Preempted
from ddm_ray.jobs.published import Weights
from ddm_ray.jobs.status import survey
from ddm_ray.placement import TrainPlacement
from ddm_ray.run.graph import MONOLITH, Artifact
from ddm_ray.run.run import Run
from ddm_ray.sampling.initial_weights import create_run
from ddm_ray.sampling.run_models import load_network
from ddm_ray.train import worker
from ddm_ray.train.job import train_job
from ddm_ray.train.teachers import first_model
from tests.derived import extend
from tests.random_run import make_data, make_run
from tests.train.conftest import SHORT

pytestmark = pytest.mark.contract

EXPERT = Artifact("experts/001")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(str(tmp_path_factory.mktemp("begun") / "source"), num_rows=60)


def make(folder: Path, source: Run) -> Run:
    settings = (f"expert.train.init_from={{source: {source.url}, network: monolith}}", *SHORT)
    run = make_data(str(folder), settings=settings)
    return create_run(run.url, run.config)[0]


def test_interrupted_it_ends_with_the_same_bits(quiet: Run, source: Run, tmp_path: Path) -> None:
    undisturbed = make(tmp_path / "undisturbed", source)
    first = first_model(undisturbed, train_job(undisturbed, EXPERT)).state_dict()
    trained = load_network(source, Weights.finished(source, MONOLITH)).state_dict()
    assert all(torch.equal(first[name], tensor) for name, tensor in trained.items())
    worker.train(undisturbed.url, EXPERT, TrainPlacement())

    killed = make(tmp_path / "killed", source)
    steps = count(1)
    with pytest.raises(Preempted):
        worker.train(killed.url, EXPERT, TrainPlacement(), notice=lambda: next(steps) == 5)
    worker.train(killed.url, EXPERT, TrainPlacement())

    def sums(run: Run) -> set[str]:
        return {record.sha256 for name, record in run.require(EXPERT).files.items() if name.endswith("safetensors")}

    assert sums(undisturbed) == sums(killed) != sums(quiet)
    assert quiet.drift(EXPERT, undisturbed.require(EXPERT).identity) == ["expert.train.init_from: {} -> null"]


def test_its_extension_begins_with_the_copy_where_no_state_is_left(
    world_of_one: None, source: Run, tmp_path: Path
) -> None:
    run = make(tmp_path / "run", source)
    worker.train(run.url, EXPERT, TrainPlacement())
    copytree(run.url, tmp_path / "stateless")
    longer = [extend(Run.open(url), "expert.train.steps=15") for url in (run.url, str(tmp_path / "stateless"))]
    rmtree(tmp_path / "stateless" / EXPERT / "attempts/0001/state")
    for each in longer:
        states = {status.artifact: status.state for status in survey(each)}
        assert states["beginnings/expert"] == "finished" and each.inherits(Artifact("beginnings/expert"))
        worker.train(each.url, EXPERT, TrainPlacement())
    assert longer[0].require(EXPERT).files == longer[1].require(EXPERT).files
