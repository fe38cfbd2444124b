"""A server in a process of its own, requests to it from many clients, and what it costs."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.processes import command, family

GENERATIONS = "/v1/images/generations"
START_S = 300.0
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Answer:
    """Status, seconds from the request to the last byte, and the body."""

    status: int
    seconds: float
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)


class Client:
    """One client, which keeps its connection."""

    def __init__(self, port: int):
        self._port = port
        self._connection: HTTPConnection | None = None

    def ask(self, method: str = "POST", path: str = GENERATIONS, **body: Any) -> Answer:
        """The answer; status 0 where the connection broke."""
        began = time.perf_counter()
        try:
            self._connection = self._connection or HTTPConnection("127.0.0.1", self._port, timeout=330)
            data = json.dumps(body) if method == "POST" else None
            self._connection.request(method, path, data, {"Content-Type": "application/json"} if data else {})
            response = self._connection.getresponse()
            content = response.read()
        except OSError as error:
            self._connection = None
            return Answer(0, time.perf_counter() - began, str(error).encode())
        return Answer(response.status, time.perf_counter() - began, content, dict(response.headers))


@dataclass(frozen=True)
class Served:
    """A server, and what it takes of this machine."""

    process: "subprocess.Popen[bytes]"
    port: int

    def cpu_seconds(self) -> float:
        """Time of processors that all its processes have spent."""
        return sum(cpu_seconds(pid) for pid in family(self.process.pid))

    def idle_share(self, seconds: float = 5.0) -> float:
        """Share of one processor that it takes while nobody asks."""
        before = self.cpu_seconds()
        time.sleep(seconds)
        return (self.cpu_seconds() - before) / seconds

    def memory_mib(self) -> float:
        """Resident memory of its replicas."""
        replicas = [pid for pid in family(self.process.pid) if "ServeReplica" in command(pid)]
        sizes = [Path(f"/proc/{pid}/status").read_text() for pid in replicas]
        return sum(int(size.partition("VmRSS:")[2].split()[0]) for size in sizes) / 1024

    def metric(self, name: str) -> float:
        """Sum of a metric over its labels."""
        text = Client(self.port).ask("GET", "/metrics").body.decode()
        lines = [line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
        return sum(float(line.rpartition(" ")[2]) for line in lines)


@contextmanager
def serving(
    run: str, *options: str, tree: Path | None = None, environment: Mapping[str, str] | None = None
) -> Iterator[Served]:
    """`ddm serve` of a run on a port of its own, by this tree's code or another's; `environment`: more variables."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    tree = tree or Path(__file__).parents[1]
    command = [sys.executable, "-c", "from ddm_ray.cli import main; main()", "serve", run, "--port", str(port)]
    env = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", **(environment or {})}
    quiet = subprocess.DEVNULL
    process = subprocess.Popen([*command, *options], cwd=tree, env=env, stdout=quiet, stderr=quiet, stdin=quiet)
    served = Served(process, port)
    try:
        until, client = time.monotonic() + START_S, Client(port)
        while client.ask("GET", "/healthz").status != 200:
            if process.poll() is not None or time.monotonic() > until:
                sys.exit(f"no server of {run}: {' '.join(command)}")
            time.sleep(0.2)
        yield served
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


def closed_loop(port: int, num_clients: int, seconds: float, body: Callable[[int], dict[str, Any]]) -> list[Answer]:
    """Answers to clients that each ask again once they are answered; `body` of the n-th request."""
    answers, lock, until = list[Answer](), threading.Lock(), time.monotonic() + seconds
    number = iter(range(10**9))

    def keep_asking() -> None:
        client = Client(port)
        while time.monotonic() < until:
            with lock:
                own = next(number)
            answer = client.ask(**body(own))
            with lock:
                answers.append(answer)

    run_all([threading.Thread(target=keep_asking) for _ in range(num_clients)])
    return answers


def open_loop(port: int, a_second: float, seconds: float, body: Callable[[int], dict[str, Any]]) -> list[Answer]:
    """Answers to requests at a steady rate, whoever else waits, each by a client of its own."""
    answers, lock = list[Answer](), threading.Lock()
    idle = list[Client]()

    def ask(number: int) -> None:
        with lock:
            client = idle.pop() if idle else Client(port)
        answer = client.ask(**body(number))
        with lock:
            idle.append(client)
            answers.append(answer)

    threads, began = [], time.monotonic()
    for number in range(int(a_second * seconds)):
        time.sleep(max(0.0, began + number / a_second - time.monotonic()))
        threads.append(threading.Thread(target=ask, args=[number]))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return answers


@contextmanager
def probing(port: int, path: str, every: float = 0.2) -> Iterator[list[Answer]]:
    """Answers to one client that asks for this every so many seconds; all once the context has ended."""
    answers, stop = list[Answer](), threading.Event()

    def probe() -> None:
        client = Client(port)
        while not stop.wait(every):
            answers.append(client.ask("GET", path))

    thread = threading.Thread(target=probe)
    thread.start()
    try:
        yield answers
    finally:
        stop.set()
        thread.join()


def run_all(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def quantile(values: Sequence[float], share: float) -> float:
    """The value that this share of all is at most as large as; 0 where there are none."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def cpu_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS
