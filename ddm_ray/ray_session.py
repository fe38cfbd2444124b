"""Which Ray a command runs on: the one it is told, the one whose job it is, or a private one of its own."""

import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from ddm_ray.errors import RayError

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# The driver asks for no GPU, and workers set their own: keep Ray from hiding or warning about devices.
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray


@contextmanager
def ray_session(address: str | None = None) -> Iterator[bool]:
    """Connect to `address` or $RAY_ADDRESS, else (or for "local") start a private Ray; leave or stop it in the end.

    Yields whether it is a private one. Where Ray is connected already, that is used and left as it is.
    Raises RayError where there is no Ray at the address.
    """
    if ray.is_initialized():
        yield False
        return
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    if address != "local":
        _join(address)
        try:
            yield False
        finally:
            ray.shutdown()
        return
    # A private Ray listens on loopback for this user alone; a token would be left lying for other clusters.
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    # Its one node is this machine: nobody announces its end, and a watcher a job costs seconds to start.
    os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
    folder = tempfile.mkdtemp(prefix="ddm-ray-", dir="/tmp")  # short, since sockets live below it
    try:
        ray.init(
            address="local",
            include_dashboard=False,
            # Many small jobs on few cores are meant here; Ray would warn of them again and again.
            _system_config={"worker_maximum_startup_concurrency": 64},
            _temp_dir=folder,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        yield True
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def _join(address: str) -> None:
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if port.isdecimal():
            # Ray itself would try for many minutes.
            socket.create_connection((host, int(port)), timeout=10).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, OverflowError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        reason = " ".join(str(error).split())[:200]
        raise RayError(f"no Ray to join at {address}: {reason}; check --address or $RAY_ADDRESS") from None
