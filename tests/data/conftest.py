import pytest

from ddm_ray.data.partition.stage import partition
from ddm_ray.run.run import Run
from tests.data.rows import commit_rows


@pytest.fixture(scope="session")
def parted(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Recipe tiny's digits in two shards, without a report, for tests to read or to copy."""
    run = commit_rows(str(tmp_path_factory.mktemp("parted") / "run"))
    partition(run, with_report=False)
    return run
