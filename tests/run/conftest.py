"""A run of recipe tiny on the local disk, new or partitioned."""

from collections import Counter
from pathlib import Path

import pytest

from ddm_ray.config import RunConfig, load_recipe
from ddm_ray.run.graph import PARTITION, ROWS, shard
from ddm_ray.run.run import Run
from tests.run.artifacts import write_and_commit
from tests.store_meter import StoreMeter


@pytest.fixture(scope="session")
def config() -> RunConfig:
    return load_recipe("tiny")


@pytest.fixture
def run(tmp_path: Path, config: RunConfig) -> Run:
    return Run.create(str(tmp_path / "run"), config)


@pytest.fixture
def partitioned(run: Run) -> Run:
    """A run whose rows, shards and partition are finished."""
    write_and_commit(run, ROWS, {"part-0.parquet": b"rows"})
    for cluster in range(run.config.partition.num_clusters):
        write_and_commit(run, shard(cluster), {"part-0.parquet": f"rows of {cluster}".encode()})
    write_and_commit(run, PARTITION, {"centroids.safetensors": b"centroids"})
    return run


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the store was asked, by kind of request."""
    return StoreMeter(monkeypatch).requests
