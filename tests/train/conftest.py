"""Short runs to train, and one that is trained."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.nn.functional

from ddm_ray.placement import TrainPlacement
from ddm_ray.run.graph import ROUTER, expert
from ddm_ray.run.run import Run
from tests.random_run import make_data

SHORT = (
    "expert.train.steps=12",
    "expert.train.batch=6",
    "router.train.steps=12",
    "router.train.batch=10",
)


@pytest.fixture(autouse=True)
def torchs_own_linear() -> Iterator[None]:
    """ZeRO stage 3 replaces torch's function for the whole process, and leaves it so for all later tests."""
    own = torch.nn.functional.linear
    yield
    torch.nn.functional.linear = own


@pytest.fixture
def short_run(tmp_path: Path) -> Run:
    """Rows and shards of real digits, jobs of 12 steps, nothing trained yet."""
    return make_data(str(tmp_path / "run"), settings=SHORT)


@pytest.fixture(scope="session")
def quiet(world_of_one: None, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The short run, its second expert and the router trained without an interruption. Only to be read."""
    from ddm_ray.train import worker

    run = make_data(str(tmp_path_factory.mktemp("quiet") / "run"), settings=SHORT)
    for artifact in (expert(1), ROUTER):
        worker.train(run.url, artifact, TrainPlacement())
    return run
