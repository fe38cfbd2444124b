"""What all tests share: one island (a Ray cluster of its own), and the commands of a user."""

import gc
import importlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import hypothesis
import pytest

from tests import crashes, tiers, workers

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
ISLANDS = str(ROOT / "cluster_configs/local/islands.yaml")
# Files whose tests share a Ray, or start their own: each lane has one worker, so that few Rays run at once.
LANES = {
    "nodes": ("train/ray/test_faults.py", "train/ray/test_room.py"),
    "island": (
        "test_doors.py",
        "test_page_commands.py",
        "test_readme.py",
        "test_appended_by_ray.py",
        "test_libraries_stderr.py",
        "test_tokens.py",
        "test_forked.py",
        "test_cli.py",
        "islands/test_check.py",
        "islands/test_work_command.py",
        "train/ray/test_lost_controllers.py",
        "train/ray/test_side_by_side.py",
        "train/ray/test_twice.py",
        "data/prepare/test_prepare.py",
        "data/prepare/test_prepare_kill.py",
        "data/partition/test_partition_ray.py",
    ),
    "private": (
        "islands/test_local_islands.py",
        "test_demo.py",
        "test_page_blocks.py",
        "test_notebook.py",
        "serve/cluster/test_http.py",
        "serve/cluster/test_http_faults.py",
        "serve/cluster/test_mixture_yaml.py",
    ),
}
# Other files that take long, the longest first: one that begins last runs alone in the end. None that trains in this
# process: what DeepSpeed changes in torch stays, and tests of networks come before it.
LONG = (
    "islands/test_work.py",
    "train/test_policies.py",
    "train/test_rank_faults.py",
    "data/test_disk_faults.py",
    "train/test_micro_batch.py",
    "data/test_damage.py",
    "data/partition/test_partition.py",
    "train/test_cut_off.py",
    "train/test_s3_faults.py",
)
SUBMIT = "ray job submit --working-dir ."
"""The README's words that submit a door to the Ray at RAY_ADDRESS."""
_held: list[socket.socket] = []

# How long an example takes is the machine's affair.
hypothesis.settings.register_profile("ddm", deadline=None)
hypothesis.settings.load_profile("ddm")

# Some containers keep Python from it: then each worker would rewrite and compile all tests anew.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Before torch or Ray are imported: two spinning threads on a busy machine are far slower than one.
os.environ.update(OMP_NUM_THREADS="1", RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="token")
# Tests are of the CPU also where there is a GPU, which libraries would take unasked.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
# A node starts as many workers as it has CPUs before anyone asks for one: seconds of a core, each time.
os.environ["RAY_prestart_worker_first_driver"] = "0"  # noqa: SIM112  (Ray's own spelling)
# Those that it starts are forked from a process that has imported torch: imports took a fifth of the tests' CPU time.
os.environ["PYTHONPATH"] = f"{ROOT}/tests/forked:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
TRAINS = {"DDM_TESTS_PRELOAD": "torch._dynamo deepspeed.runtime.zero.muon.muon_optimizer"}
"""Environment of a Ray whose workers train: what is loaded before they are forked."""
for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
    os.environ.pop(name, None)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(tiers, "tiers")
    config.pluginmanager.register(crashes, "crashes")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slice", metavar="K/N", help="the K-th of N shares of the tests, K from 0")
    parser.addoption("--in-bucket", action="store_true", help="runs of tests/train/ray lie in a bucket, not a folder")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With several workers (-n) a file is one worker's, as are all files of a lane; lanes come first, then LONG."""
    from xdist.scheduler import LoadScopeScheduling

    class Lanes(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return lane_of(nodeid) or nodeid.partition("::")[0]

    config.option.loadscopereorder = False
    return Lanes(config, log)


def lane_of(nodeid: str) -> str:
    """The lane of a test, empty if its file may be anybody's."""
    return next((lane for lane, files in LANES.items() if file_of(nodeid) in files), "")


def file_of(nodeid: str) -> str:
    """The file of a test, below tests/."""
    return nodeid.partition("::")[0].removeprefix("tests/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: place for place, name in enumerate((*LANES, *LONG))}
    items.sort(key=lambda item: order.get(lane_of(item.nodeid) or file_of(item.nodeid), len(order)))
    for item in items:
        if "island" in getattr(item, "fixturenames", ()):
            assert lane_of(item.nodeid) == "island", f"{item.nodeid}: its file belongs into LANES"


def pytest_sessionstart() -> None:
    # What is imported stays: to look through it for garbage, again and again, takes a tenth of the tests' time.
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else nanobind calls what it finds at the process's end leaks


@dataclass(frozen=True)
class Island:
    """A running Ray cluster: its address for drivers, its Jobs API, and the file that has its token."""

    ray: str
    jobs: str
    token: Path
    process: subprocess.Popen[bytes]

    def environment(self, names: dict[str, str]) -> dict[str, str]:
        """For a driver of this island: it and its workers have these names."""
        hook = {"RAY_RUNTIME_ENV_HOOK": "tests.workers.with_names", workers.NAMES: json.dumps(names)}
        return {**names, **hook, "RAY_ADDRESS": self.ray, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}


def free_island() -> int:
    """A number whose ports nobody else has until this process ends.

    Of an island's hundred ports the tenth stays unused: holding it holds the number, against others' tests too.
    """
    for number in range(10, 90):
        held, probe = socket.socket(), socket.socket()
        with probe, suppress(OSError):
            held.bind(("127.0.0.1", 20000 + 100 * number + 9))
            if probe.connect_ex(("127.0.0.1", 20000 + 100 * number)):
                _held.append(held)
                return number
        held.close()
    raise AssertionError("no island number is free")


def fresh_token() -> dict[str, str]:
    """The environment of a Ray that nobody else gets an answer from."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


@pytest.fixture(params=[pytest.param(False, id="few"), pytest.param(True, id="every", marks=pytest.mark.chaos)])
def every(request: pytest.FixtureRequest) -> bool:
    """Whether a test tries all faults, schedules or draws, or some of them."""
    return bool(request.param)


@pytest.fixture(scope="session")
def island(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Island]:
    """cluster_configs/local/island.sh with four (logical) CPUs, for the whole session, which has its token."""
    number, home = free_island(), tmp_path_factory.mktemp("island")
    log = home / "log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            # Nobody reads what its log monitor would send to drivers.
            [str(ROOT / "cluster_configs/local/island.sh"), str(number), "4", "--include-log-monitor=false"],
            stdout=sink,
            stderr=sink,
            env={**os.environ, **TRAINS, "PATH": f"{BIN}:{os.environ['PATH']}", "HOME": str(home)},
            start_new_session=True,
        )
    base, token = 20000 + 100 * number, home / f".ddm/island-{number}/token"
    started = Island(f"127.0.0.1:{base}", f"http://127.0.0.1:{base + 1}", token, process)
    try:
        version = f"{started.jobs}/api/version"
        wait_for(lambda: token.exists() and answers(version, token.read_text()), 120, lambda: log.read_text()[-3000:])
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)
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


def answers(url: str, token: str = "") -> bool:
    """Whether an HTTP server answers there, given this token."""
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"}), timeout=2
        ):
            return True
    except OSError:
        return False


def wait_for(condition: Callable[[], object], seconds: float, why: Callable[[], str] = str, every: float = 0.1) -> None:
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


def ddm(
    *arguments: str, timeout: float = 300, where: str | Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """The installed `ddm` command, as a user runs it standing in a folder, with an environment beside the usual one."""
    command, environment = [str(BIN / "ddm"), *arguments], {**os.environ, **environment}
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, cwd=where, env=environment, check=False
        )
    except subprocess.TimeoutExpired as error:
        printed = (error.stdout or b"") + (error.stderr or b"")
        raise AssertionError(f"{arguments} after {timeout} s: {printed.decode()[-3000:]}") from None


def submit(island: Island, door: str, *arguments: str) -> str:
    """Submit one door as its docstring says and wait for the end of the job; what it printed."""
    text = (ROOT / "jobs" / f"{door}.py").read_text()
    assert f"--working-dir . -- python jobs/{door}.py " in text
    words = ["--", "python", f"jobs/{door}.py", *arguments]
    where = {**os.environ, "RAY_ADDRESS": island.jobs, "PATH": f"{BIN}:{os.environ['PATH']}"}
    done = subprocess.run(
        [*SUBMIT.split(), *words], capture_output=True, text=True, timeout=400, cwd=ROOT, env=where, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


@pytest.fixture(scope="session")
def world_of_one() -> Iterator[None]:
    """A torch.distributed world of this process alone; one for the session: DeepSpeed keeps the first it is given."""
    import torch

    from ddm_ray.train import local

    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            patch.setenv(name, "")  # put back in the end
        with local.world():
            yield
    torch.set_num_threads(threads)


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """A script of benchmarks/ as a module, which imports what lies beside it."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module
