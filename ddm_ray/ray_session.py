"""The Ray that a command runs on: the one at an address, the one that the command is a job of, or a private one."""

import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import ray

from ddm_ray.cores import busy_words, usable_cores
from ddm_ray.environment import prepare_ray, variables
from ddm_ray.errors import ConfigError, RayAway, RayError, Stopped, Superseded
from ddm_ray.plain_text import from_utf8, stripped
from ddm_ray.private_folder import LIBRARIES, copy_logs, private_folder
from ddm_ray.ray_internals import CONFIG, ERRORS_PRINTED, NO_COUNTERS, NO_WATCHER, TOKEN_LOADER
from ddm_ray.remedies import Give
from ddm_ray.spelling import one_line

STDERR = 2
AGAIN_SECONDS = (2.0, 10.0, 10.0, 10.0)
"""Pauses between tries to start a private Ray. Some of its parts get 30 s to start; a busy machine may need more."""
_logs = threading.Event()  # set if the logs are to be kept
TOKEN = "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to the file that has its token"


def ray_address(address: str | None) -> str:
    """The address of the Ray that a session joins: `address`, else $RAY_ADDRESS, else "local" for a private Ray."""
    return address or os.environ.get("RAY_ADDRESS") or "local"


@contextmanager
def ray_session(
    address: str | None = None, token_file: str | None = None, cores: float = 0.0, scratch: str | None = None
) -> Iterator[bool]:
    """Connect to `address` or $RAY_ADDRESS, else (or for "local") start a private Ray. Leave or stop it in the end.

    Yields True for a private Ray. If this process is already connected, that connection is used and stays open.
    `cores`: cores that a private Ray keeps busy, which `busy_cores` shows to other commands. `scratch`: folder to which
    a private Ray spills objects; by default beside its logs. `token_file`: file with the token of the Ray at the
    address; by default the environment has it. Raises RayAway if there is no Ray at the address, RayError if it
    requires another token, and ConfigError for a token that can't be read.
    """
    if ray.is_initialized():
        yield False
        return
    prepare_ray()
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    address = ray_address(address)
    if address != "local":
        with _environment(_token(token_file) if token_file else {}), _joined(address):
            yield False
        return
    # Ray gets a folder within the private one, since it makes its own folder accessible to all users.
    with (
        _environment(_private()),
        private_folder(cores) as folder,
        _libraries_write_to(Path(folder, LIBRARIES)),
        _errors_unprinted(),
    ):
        _logs.clear()
        try:
            _start(f"{folder}/ray", scratch)
            yield True
        except (ConfigError, Stopped, Superseded):
            raise
        except Exception:
            keep_logs()
            raise
        finally:
            ray.shutdown()
            if _logs.is_set():
                copy_logs(Path(folder))


@contextmanager
def ray_job(address: str, environment: Mapping[str, Any]) -> Iterator[None]:
    """Connect to the Ray at `address` as a job with this runtime environment and the token in os.environ.

    Raises the errors of `ray_session`.
    """
    prepare_ray()
    _read_environment()
    with _joined(address, environment):
        yield


def keep_logs() -> None:
    """Keep a copy of the private Ray's logs when it ends, since something has failed."""
    _logs.set()


@contextmanager
def _errors_unprinted() -> Iterator[None]:
    """Keep Ray from printing guesses and its log for each lost worker or node, which the training code reports."""
    module = import_module(ERRORS_PRINTED.module)
    setattr(module, ERRORS_PRINTED.name, False)
    try:
        yield
    finally:
        setattr(module, ERRORS_PRINTED.name, True)


@contextmanager
def _libraries_write_to(file: Path) -> Iterator[None]:
    """Redirect descriptor 2 (Ray's C++ log, for one) to a file, unless Python's stderr uses that descriptor."""
    try:
        own = sys.stderr.fileno() != STDERR
    except (AttributeError, OSError, ValueError):
        own = False  # stderr is closed or isn't a file, as in a test or a notebook
    if not own:
        yield
        return
    before = os.dup(STDERR)
    with file.open("wb", 0) as sink:
        os.dup2(sink.fileno(), STDERR)
    try:
        yield
    finally:
        os.dup2(before, STDERR)
        os.close(before)


def _start(folder: str, scratch: str | None) -> None:
    """Start a private Ray. Try again after AGAIN_SECONDS if it doesn't start. Raises RayAway if it never does."""
    for pause in (*AGAIN_SECONDS, None):
        try:
            _init(
                address="local",
                num_cpus=usable_cores(),
                include_dashboard=False,
                _temp_dir=folder,
                object_spilling_directory=scratch,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
            return
        except Exception as error:
            ray.shutdown()
            if pause is None:
                tries, fix = len(AGAIN_SECONDS) + 1, f"try again when this machine is less busy{busy_words()}"
                raise RayAway(f"a private Ray doesn't start, {tries} times: {one_line(error, 200)}", fix) from None
            time.sleep(pause)


def _init(**options: Any) -> None:
    """`ray.init` that puts the handler of SIGTERM back: Ray's own would end this process at once."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(**options)
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def cluster_total(resource: str) -> float:
    """Total amount of a resource, such as GPU or memory (in bytes), of the Ray that this process is connected to."""
    return float(ray.cluster_resources().get(resource, 0))


def on_head() -> bool:
    """True if this process runs on the head node of the connected Ray."""
    host = ray.get_runtime_context().gcs_address.rpartition(":")[0]
    with suppress(OSError):
        return any(interface_of(str(info[4][0])) for info in socket.getaddrinfo(host, None))
    return False


def interface_of(address: str) -> str | None:
    """The network interface of this machine with this address; None if there is none, as with NAT in some clouds."""
    import psutil

    by_name = psutil.net_if_addrs().items()
    return next((str(name) for name, addresses in by_name if address in {each.address for each in addresses}), None)


@contextmanager
def losses_of_ray() -> Iterator[None]:
    """Turn the errors that Ray raises in a driver after the cluster is lost into RayAway, which passes."""
    try:
        yield
    except (ray.exceptions.RayError, ConnectionError) as error:
        raise RayAway(f"Ray was lost: {one_line(error, 200)}") from None


def _private() -> dict[str, str]:
    """Return the environment of a private Ray. It has a token of its own, since Ray listens on all addresses."""
    return {
        **{name: os.environ.get(name, value) for name, value in {**NO_COUNTERS, **NO_WATCHER}.items()},
        # Many small jobs on few cores are intended; Ray would warn of them repeatedly.
        "RAY_worker_maximum_startup_concurrency": "64",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }


def _token(path: str) -> dict[str, str]:
    """Return the environment of a process with the token in this file."""
    try:
        token = stripped(from_utf8(Path(path).expanduser().read_bytes()))
    except (OSError, ValueError) as error:
        raise ConfigError(f"token_file {path}: {one_line(error, 200)}") from None
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}


@contextmanager
def _environment(names: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for Ray and its processes. Restore them in the end, since they concern one cluster."""
    try:
        with variables(names):
            _read_environment()
            yield
    finally:
        _read_environment()


def _read_environment() -> None:
    """Make Ray read the authentication mode and token again; it caches those that it saw first."""
    CONFIG.get().initialize("")
    TOKEN_LOADER.get().instance().reset_cache()


def require_ray(address: str | None) -> None:
    """Raise RayAway if nothing listens at the address (None: $RAY_ADDRESS) that a session would join."""
    address = ray_address(address)
    try:
        _knock(address)
    except (OSError, OverflowError) as error:
        raise _away(address, error) from None


def _knock(address: str) -> None:
    """Connect to HOST:PORT and close the connection. Ray itself would try for many minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdecimal():
        socket.create_connection((host, int(port)), timeout=10).close()


def _away(address: str, error: Exception) -> RayError:
    fix = Give("address", "check $RAY_ADDRESS, or name another Ray")
    kind = RayError if isinstance(error, OverflowError | ValueError) else RayAway  # RayError: an invalid address
    return kind(f"no Ray to join at {address}: {one_line(error, 200)}", fix)


@contextmanager
def _joined(address: str, environment: Mapping[str, Any] | None = None) -> Iterator[None]:
    with _errors_unprinted():
        _join(address, environment)
        try:
            yield
        finally:
            ray.shutdown()


def _join(address: str, environment: Mapping[str, Any] | None) -> None:
    try:
        _knock(address)
        _init(address=address, runtime_env=environment, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, OverflowError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        # After retries Ray keeps its reason only as text.
        if ray.exceptions.AuthenticationError.__name__ in f"{error!r} {error.__cause__}":
            raise RayError(f"the Ray at {address} refuses this token; {TOKEN}") from None
        if "Version mismatch" in str(error):
            line = f"the Ray at {address} has another version of Ray or Python: {one_line(error, 300)}"
            raise RayError(line, "install the same there and here") from None
        raise _away(address, error) from None
