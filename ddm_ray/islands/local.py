"""Small islands on this machine: Ray clusters of one node, each with ports and a token of its own, that outlive us."""

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from ddm_ray.cores import usable_cores
from ddm_ray.errors import ConfigError, RayAway, RayError
from ddm_ray.islands import ports
from ddm_ray.islands.jobs import JobsAPI
from ddm_ray.islands.local_files import IslandFolder, LocalIsland
from ddm_ray.islands.processes import MARKER, boot, end, lives, read_process, require_proc
from ddm_ray.ray_internals import NO_COUNTERS, NO_WATCHER
from ddm_ray.spelling import printable

TRIES = 8
"""Starts of an island: Ray gives a node 30 seconds to register, and has no option for more, however busy all is."""
START_SECONDS, READY_SECONDS = 90.0, 240.0
"""Longest time until Ray says that it runs, and from then on until a job has run."""
_RUNS = "Ray runtime started"
_OBJECTS, _FEWEST_OBJECT_BYTES = 0.3, 80 << 20
"""Share of the memory that Ray's default gives to objects, here all islands together; the least that it takes."""

Report = Callable[[str, str], None]
"""Called with an island's name and what has become of it, by several threads."""


class LocalIslands:
    """The islands of a folder, brought up and down."""

    def __init__(self, folder: Path, report: Report):
        self._folder, self._report = IslandFolder(folder), report
        # More at once than there are cores for, and none keeps Ray's time.
        self._starting = threading.Semaphore(max(1, usable_cores() // 2))
        self._interrupted = threading.Event()

    def up(self, number: int, cpus: int) -> Path:
        """Bring up what is missing of `number` islands of so many CPUs each; the path of their islands.yaml.

        Each is ready: a job has run on it. Raises RayAway or RayError for one that can't be brought up, of which
        nothing is left but a log; the others stay.
        """
        require_proc()
        with self._folder.alone():
            try:
                with ThreadPoolExecutor(number) as pool:
                    begun = [pool.submit(self._up, f"local-{place}", cpus, number) for place in range(number)]
                    try:
                        failures = [error for each in begun if (error := each.exception())]
                    except BaseException:
                        self._interrupted.set()
                        raise
            finally:
                path = self._folder.write_islands()
        if failures:
            raise failures[0]
        return path

    def down(self) -> int:
        """End all islands of the folder and remove their files, islands.yaml aside; the number of islands.

        Raises RayError if one of them can't be ended.
        """
        require_proc()
        if not self._folder.path.is_dir():
            return 0
        with self._folder.alone():
            islands = self._folder.islands()
            with ThreadPoolExecutor(max(1, len(islands))) as pool:
                list(pool.map(self._end, islands))
        return len(islands)

    def _up(self, name: str, cpus: int, number: int) -> None:
        island = self._folder.island(name)
        if island is not None and lives(island.leader):
            self._probe(island)
            self._report(name, f"runs already, with {_counted(island.cpus, 'CPU')}")
            return
        if island is not None:
            self._report(name, "has lost its head; what is left of it is ended")
            self._end(island)
        # Where it was before, if it was: whoever knows its address goes on.
        blocks = (*([island.base] if island else []), *ports.BLOCKS)
        for attempt in range(1, TRIES + 1):
            try:
                self._start(name, cpus, number, blocks)
                return
            except RayAway as error:
                if self._interrupted.is_set() or attempt == TRIES:
                    raise
                self._report(name, f"{error.message}; try {attempt + 1} of {TRIES}")

    def _start(self, name: str, cpus: int, number: int, blocks: Sequence[int]) -> None:
        """Start an island and wait until a job has run on it. Raises RayAway after ending what was started."""
        with ports.free_block(blocks) as base:
            # Short, since sockets' paths are; Ray opens the folder it is given to everybody: one within ours.
            temp = tempfile.mkdtemp(prefix="ddm-", dir="/tmp")
            island = LocalIsland(name=name, mark=secrets.token_hex(16), cpus=cpus, base=base, temp=temp, boot=boot())
            self._folder.record(island)
            try:
                with self._starting:
                    island = self._launch(island, number)
                    self._report(name, "starts")
                    self._wait(island, lambda: _RUNS in "\n".join(self._folder.log_lines(name)), START_SECONDS)
                self._report(name, "runs; a first job is tried")
                self._probe(island)
            except BaseException:
                self._end(island, quietly=True)
                raise
        self._report(name, f"is ready, with {_counted(cpus, 'CPU')}: {island.jobs}")

    def _launch(self, island: LocalIsland, number: int) -> LocalIsland:
        """Start Ray's head as the leader of a session; the island with its process, as recorded."""
        self._require_going_on(island)
        token = self._folder.new_token(island.name)
        options = ports.options(island.base) | {
            "node-ip-address": "127.0.0.1",
            "num-cpus": island.cpus,
            "object-store-memory": max(_FEWEST_OBJECT_BYTES, int(_OBJECTS * _memory() / number)),
            "temp-dir": f"{island.temp}/ray",
            "include-dashboard": "true",
            "dashboard-host": "127.0.0.1",
            "include-log-monitor": "false",  # it sends workers' lines to drivers, which show none
        }
        flags = [f"--{name}" for name in ("head", "block", "disable-usage-stats")]
        with self._folder.log(island.name).open("wb") as log:
            process = subprocess.Popen(
                [_ray(), "start", *flags, *(f"--{name}={value}" for name, value in options.items())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment(os.environ, island, token),
                cwd=island.temp,
                start_new_session=True,
            )
        # Who has ended stays a zombie until he is waited for.
        threading.Thread(target=process.wait, daemon=True).start()
        began = read_process(process.pid)
        island = island.model_copy(update={"pid": process.pid, "start": began.start if began else 0})
        self._folder.record(island)
        return island

    def _probe(self, island: LocalIsland) -> None:
        """Wait until a job has run on an island: its Jobs API answers long before it takes any."""
        jobs = JobsAPI(island.name, island.jobs, str(self._folder.token(island.name)))
        probe = f"ddm-probe-{secrets.token_hex(4)}"

        def submitted() -> bool:
            with suppress(RayAway):
                jobs.submit("true", probe)
                return True
            return False

        def succeeded() -> bool:
            with suppress(RayAway):
                job = jobs.job(probe)
                if job is not None and job.ended and job.status != "SUCCEEDED":
                    raise RayError(f"island {island.name}: its first job {job.status}: {printable(job.message, 300)}")
                return job is not None and job.ended
            return False

        self._wait(island, submitted, READY_SECONDS)
        self._wait(island, succeeded, READY_SECONDS)

    def _wait(self, island: LocalIsland, condition: Callable[[], bool], seconds: float) -> None:
        deadline, log = time.monotonic() + seconds, self._folder.log(island.name)
        while not condition():
            self._require_going_on(island)
            if not lives(island.leader):
                reason = printable((self._folder.log_lines(island.name) or ["nothing printed"])[-1], 200)
                raise RayAway(f"island {island.name}: Ray ended as it started: {reason}", f"see {log}")
            if time.monotonic() > deadline:
                raise RayAway(f"island {island.name}: not ready after {seconds:.0f} s", f"see {log}")
            time.sleep(0.3)

    def _require_going_on(self, island: LocalIsland) -> None:
        if self._interrupted.is_set():
            raise RayAway(f"island {island.name}: interrupted")

    def _end(self, island: LocalIsland, quietly: bool = False) -> None:
        """End an island's processes and remove its files, `quietly` but its log. Raises RayError if one still lives."""
        count, left = end(island.leader)
        if left:
            pids = ", ".join(str(process.pid) for process in left)
            raise RayError(f"island {island.name}: processes {pids} can't be ended", "end them as their owner")
        shutil.rmtree(island.temp, ignore_errors=True)
        self._folder.forget(island.name, keep_log=quietly)
        if not quietly:
            used = ports.in_use(island.base)
            others = f"; others listen to its {_counted(len(used), 'port')}: {used}" if used else ""
            self._report(island.name, f"ended: {_counted(count, 'process')}{others}")


def environment(names: Mapping[str, str], island: LocalIsland, token: Path) -> dict[str, str]:
    """Environment of an island: that of whoever starts it, but for what belongs to another Ray."""
    kept = {name: value for name, value in names.items() if not name.startswith("RAY_")}
    # Jobs are to have this project's commands.
    path = f"{Path(sys.executable).parent}:{names.get('PATH', os.defpath)}"
    own = {
        MARKER: island.mark,
        "PATH": path,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    return NO_COUNTERS | NO_WATCHER | kept | own


def _ray() -> str:
    command = shutil.which("ray", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}")
    if command is None:
        raise ConfigError("islands on this machine need Ray", "install it with: pip install 'ddm-ray[all]'")
    return command


def _memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _counted(number: int, what: str) -> str:
    plural = "es" if what.endswith("s") else "s"
    return f"{number} {what}{plural if number != 1 else ''}"
