"""A torch.distributed world of this one process, and short runs to train in it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ddm_ray.storage.run import Run
from tests.random_run import make_data

SHORT = (
    "expert.train.steps=12",
    "expert.train.global_batch=12",
    "router.train.steps=12",
    "router.train.global_batch=10",
)


@pytest.fixture(scope="session")
def world_of_one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Rank 0 of 1 over gloo; one for the session, since DeepSpeed keeps the first group it is given."""
    rendezvous = tmp_path_factory.mktemp("world") / "rendezvous"
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", "0")
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
        yield
        dist.destroy_process_group()
    torch.set_num_threads(threads)


@pytest.fixture
def short_run(tmp_path: Path) -> Run:
    """Rows and shards of real digits, jobs of 12 steps, nothing trained yet."""
    return make_data(str(tmp_path / "run"), settings=SHORT)
