"""Which Ray a command runs on: the one it is told, the one whose job it is, or a private one of its own."""

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# The driver asks for no GPU, and workers set their own: keep Ray from hiding or warning about devices.
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray


@contextmanager
def ray_session(address: str | None = None, num_cpus: int | None = None) -> Iterator[None]:
    """Connect to `address` or $RAY_ADDRESS, else start a private local Ray; leave or stop it in the end.

    Does nothing where Ray is connected already. `num_cpus` counts only for a private one (none: all cores).
    """
    if ray.is_initialized():
        yield
        return
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    address = address or os.environ.get("RAY_ADDRESS")
    if address and address != "local":
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    else:
        # A private Ray listens on loopback for this user alone; a token would be left lying for other clusters.
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        # Its one node is this machine: nobody announces its end, and a watcher a job costs seconds to start.
        os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
        ray.init(
            address="local",
            num_cpus=num_cpus,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            # Many small jobs on few cores are meant here; Ray would warn of them again and again.
            _system_config={"worker_maximum_startup_concurrency": 64},
            _temp_dir=tempfile.mkdtemp(prefix="ddm-ray-", dir="/tmp"),
        )
    try:
        yield
    finally:
        ray.shutdown()
