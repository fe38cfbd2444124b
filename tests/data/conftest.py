import os
import tempfile
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[str]:
    """Address of a Ray cluster of two CPUs that lives as long as the tests."""
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled")
    import ray

    with tempfile.TemporaryDirectory(prefix="ddm-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        ray.init(address="local", num_cpus=2, include_dashboard=False, _temp_dir=folder)
        yield ray.get_runtime_context().gcs_address
        ray.shutdown()
