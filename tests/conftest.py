"""What all tests share: one island (a Ray cluster of its own), and the commands of a user."""

import importlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from ddm_ray.storage.run import Run

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
STEPS = 700
# So many steps that a process can be killed in the middle of them.
LONGER = ("--set", f"expert.train.steps={STEPS}", "--set", f"router.train.steps={STEPS}")
ISLANDS = str(ROOT / "cluster_configs/local/islands.yaml")

# Before torch or Ray are imported: two spinning threads on a busy machine are far slower than one.
os.environ.update(OMP_NUM_THREADS="1", RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled")
os.environ.pop("RAY_ADDRESS", None)


@dataclass(frozen=True)
class Island:
    """A running Ray cluster: its address for drivers, and its Jobs API."""

    ray: str
    jobs: str
    process: subprocess.Popen[bytes]


def free_island() -> int:
    """A number whose ports nobody listens on."""
    import socket

    for number in range(10, 90):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", 20000 + 100 * number)):
                return number
    raise AssertionError("no island number is free")


@pytest.fixture(scope="session")
def island(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Island]:
    """cluster_configs/local/island.sh with four (logical) CPUs, for the whole session."""
    number = free_island()
    log = tmp_path_factory.mktemp("island") / "log"
    command = [str(ROOT / "cluster_configs/local/island.sh"), str(number), "4"]
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command,
            stdout=sink,
            stderr=sink,
            env={**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"},
            start_new_session=True,
        )
    base = 20000 + 100 * number
    started = Island(f"127.0.0.1:{base}", f"http://127.0.0.1:{base + 1}", process)
    try:
        wait_for(lambda: answers(f"{started.jobs}/api/version"), 120, lambda: log.read_text()[-3000:])
        yield started
    finally:
        end(process)


@pytest.fixture(scope="session")
def ray_cluster(island: Island) -> Iterator[str]:
    """This process as a driver on the island; its address."""
    import ray

    ray.init(address=island.ray, log_to_driver=False)
    yield island.ray
    ray.shutdown()


def answers(url: str) -> bool:
    """Whether an HTTP server answers there."""
    try:
        with urllib.request.urlopen(url, timeout=2):
            return True
    except OSError:
        return False


def wait_for(
    condition: Callable[[], object], seconds: float, why: Callable[[], str] = str, every: float = 0.05
) -> None:
    """Poll until the condition holds; fails with `why()` after so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s in vain: {why()}"
        time.sleep(every)


def end(process: subprocess.Popen[bytes], seconds: float = 5) -> None:
    """SIGTERM, and SIGKILL to its whole session where that isn't enough."""
    process.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def heed_ctrl_c() -> None:
    """For a child process, before it starts: a shell's background jobs ignore Ctrl-C, and their children with them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def ddm(*arguments: str, timeout: float = 300, where: str | Path = ROOT) -> subprocess.CompletedProcess[str]:
    """The installed `ddm` command, as a user runs it standing in a folder."""
    command = [str(BIN / "ddm"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=where, check=False)


def submit(island: Island, door: str, *arguments: str) -> str:
    """Submit one door as its docstring says and wait for the end of the job; what it printed."""
    text = (ROOT / "jobs" / f"{door}.py").read_text()
    assert f"--working-dir . -- python jobs/{door}.py " in text
    command = [str(BIN / "ray"), "job", "submit", "--address", island.jobs, "--working-dir", ".", "--"]
    command += ["python", f"jobs/{door}.py", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=ROOT, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """A script of benchmarks/ as a module, which imports what lies beside it."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


@pytest.fixture(scope="session")
def island_run(island: Island, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Recipe tiny through the doors as far as two islands go: expert 0 and the router are trained."""
    url = str(tmp_path_factory.mktemp("doors") / "run")
    assert ddm("init", url, "--recipe", "tiny", *LONGER).returncode == 0
    submit(island, "prepare", url)
    submit(island, "partition", url)
    jobs = [("expert", "0"), ("router",)]
    with ThreadPoolExecutor(len(jobs)) as pool:
        placed = ("--islands", ISLANDS, "--island", "cpu")
        list(pool.map(lambda job: submit(island, "train", url, *job, *placed), jobs))
    return Run.open(url)
