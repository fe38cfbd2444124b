"""Short runs to train."""

from pathlib import Path

import pytest

from ddm_ray.run.run import Run
from tests.random_run import make_data

SHORT = (
    "expert.train.steps=12",
    "expert.train.global_batch=12",
    "router.train.steps=12",
    "router.train.global_batch=10",
)


@pytest.fixture
def short_run(tmp_path: Path) -> Run:
    """Rows and shards of real digits, jobs of 12 steps, nothing trained yet."""
    return make_data(str(tmp_path / "run"), settings=SHORT)
