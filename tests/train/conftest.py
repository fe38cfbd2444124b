"""A torch.distributed world of this one process, and short runs to train in it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ddm_ray.storage.run import Run
from tests.random_run import make_data

SHORT = (
    "expert.train.steps=12",
    "expert.train.global_batch=12",
    "router.train.steps=12",
    "router.train.global_batch=10",
)


@pytest.fixture(scope="session")
def world_of_one() -> Iterator[None]:
    """Rank 0 of 1; one for the session, since DeepSpeed keeps the first group it is given."""
    from ddm_ray.train import local

    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            patch.setenv(name, "")  # put back in the end
        with local.world():
            yield
    torch.set_num_threads(threads)


@pytest.fixture
def short_run(tmp_path: Path) -> Run:
    """Rows and shards of real digits, jobs of 12 steps, nothing trained yet."""
    return make_data(str(tmp_path / "run"), settings=SHORT)
