"""Supervisor of islands' jobs: it submits them through the Jobs APIs, and submits them again if they end too early.

A supervisor may be lost at any time, since all its state is on the islands. Jobs of a run and an island are numbered,
and an island refuses a second job with the same number, so that one of several supervisors starts the next job. A new
supervisor starts a job on each island without a living one. Later it restarts only jobs that may succeed next time.
"""

import hashlib
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self, TypeVar

from ddm_ray.errors import ConfigError, DDMError, RayAway
from ddm_ray.islands.jobs import JobsAPI, SubmittedJob
from ddm_ray.memory import full_memory
from ddm_ray.placement import Island
from ddm_ray.spelling import printable

# Exit codes after which a restart is useless: a final failure, wrong usage, not executable, not found.
IN_VAIN = {1, 2, 126, 127}
RESTART_SECONDS = 15.0
"""Pause before an ended job is started again."""
_METADATA_LENGTH = 1000
# Ray's own line in every job's log, which is sometimes the last one.
_BEGINNING = "Running entrypoint for job"

T = TypeVar("T")
IslandState = Literal["submitted", "running", "done", "again", "failed", "stopped", "away"]
SETTLED: tuple[IslandState, ...] = ("done", "failed", "stopped")
"""States of an island in which its supervisor does nothing more."""


@dataclass(frozen=True)
class IslandJob:
    """An island's newest job, as last seen. `job`: its submission id, empty before the first. `text` is for people.

    States: `again`: it ended and will be started again. `failed`: something must be mended first. `stopped`: a person
    stopped it. `away`: the island doesn't answer.
    """

    island: str
    state: IslandState
    job: str = ""
    text: str = ""


def submission_id(run_url: str, island: str, number: int) -> str:
    """The id of the number-th job of a run on an island, from 1. It is the same for all supervisors."""
    digest = hashlib.sha256(f"{run_url}\0{island}".encode()).hexdigest()[:12]
    return f"ddm-{re.sub('[^A-Za-z0-9_-]', '-', island)[:40]}-{digest}-{number}"


def complaint(lines: Sequence[str]) -> str:
    """The last line of a log that begins with `error: `, else the last line, empty if there is none."""
    lines = [printable(line, 500) for line in lines if line.strip() and not line.startswith(_BEGINNING)]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or [""])[-1]


def last(ask: Callable[[int], T | None], low: int) -> tuple[int, T | None]:
    """The highest number above `low` with an answer, and that answer; `low` and None if there is none.

    All numbers from 1 to the wanted one have answers. Steps that double and then halve need few requests.
    """
    answer: T | None = None
    high: int | None = None
    step = 1
    while high is None or high - low > 1:
        middle = low + step if high is None else (low + high) // 2
        if (here := ask(middle)) is None:
            high = middle
        else:
            low, answer, step = middle, here, 2 * step
    return low, answer


class KeptJob:
    """One island's job, which is restarted when necessary. Each look sends one or a few requests to the island."""

    def __init__(
        self, jobs: JobsAPI, run_url: str, island: str, entrypoint: str, clock: Callable[[], float] = time.monotonic
    ):
        """`entrypoint` is a line of shell; its exit code says whether to start it again. `clock` counts seconds."""
        self._jobs, self._run_url, self._island, self._entrypoint = jobs, run_url, island, entrypoint
        self._clock = clock
        self._number = 0
        self._looked, self._stopped = False, False
        self._last = IslandJob(island, "away", text="not asked yet")
        # The number of an ended job, and when to start the next one.
        self._due: tuple[int, float] = (0, 0.0)

    def look(self) -> IslandJob:
        """Read the newest job, and submit the next one when it is due. Errors become states, not exceptions."""
        try:
            self._last = self._look()
            self._looked = True
        except RayAway as error:
            self._last = replace(self._last, state="away", text=str(error))
        except DDMError as error:
            self._last = replace(self._last, state="failed", text=str(error))
        return self._last

    def _look(self) -> IslandJob:
        job = self._newest()
        if job is None and self._stopped:
            return self._state("stopped", "somebody stopped it, then its head was lost")
        if job is None:  # there was no job yet, or the island's head was lost with its records
            return self._submit(1)
        self._stopped = self._looked and job.status == "STOPPED"
        if not job.ended:
            return self._state("running" if job.status == "RUNNING" else "submitted")
        if not self._looked:
            return self._submit(self._number + 1)
        if self._stopped:
            return self._state("stopped", "somebody stopped it")
        if job.status == "SUCCEEDED":
            return self._state("done")
        if job.exit_code in IN_VAIN:
            return self._state("failed", f"exit code {job.exit_code}: {self._why(job)}")
        return self._start_again(job)

    def _start_again(self, job: SubmittedJob) -> IslandJob:
        if self._due[0] != self._number:
            self._due = (self._number, self._clock() + RESTART_SECONDS)
        left = self._due[1] - self._clock()
        if left <= 0:
            return self._submit(self._number + 1)
        ended = "was lost" if job.exit_code is None else f"ended with exit code {job.exit_code}"
        why = full_memory(job.message) or complaint(job.message.splitlines())
        return self._state("again", f"{ended}, again in {left:.0f} s: {why}")

    def _why(self, job: SubmittedJob) -> str:
        """The line of a failed job's log with the reason. Ray's message has only the last few lines."""
        message = job.message.splitlines()[1:]
        if any(line.startswith("error: ") for line in message):
            return complaint(message)
        return complaint(self._jobs.log_tail(job.id, 200))

    def _submit(self, number: int) -> IslandJob:
        name = submission_id(self._run_url, self._island, number)
        metadata = {"run": self._run_url[:_METADATA_LENGTH], "island": self._island[:_METADATA_LENGTH]}
        # The island refuses it if another supervisor was quicker. That one's job does the same.
        self._jobs.submit(self._entrypoint, name, metadata)
        self._number = number
        return self._state("submitted")

    def _newest(self) -> SubmittedJob | None:
        """The job with the highest number, which becomes `_number`; None if there is none.

        Only an ended job has a successor, and numbers have no gaps.
        """
        job = self._ask(self._number) if self._number else None
        if job is not None and not job.ended:
            return job
        self._number, later = last(self._ask, self._number if job else 0)
        return later or job

    def _ask(self, number: int) -> SubmittedJob | None:
        return self._jobs.job(submission_id(self._run_url, self._island, number))

    def _state(self, state: IslandState, text: str = "") -> IslandJob:
        return IslandJob(self._island, state, submission_id(self._run_url, self._island, self._number), text)


class JobSupervisor:
    """A context that keeps the jobs of some islands started. Each island has a thread."""

    def __init__(
        self,
        run_url: str,
        islands: Mapping[str, Island],
        entrypoint: Callable[[Island], str],
        every: float = 5.0,
    ):
        """Supervise the islands that name their Jobs API; look at each one `every` seconds.

        `entrypoint` returns the line of shell of an island's job. Raises ConfigError if no island has a Jobs API.
        """
        self.islands = {name: island for name, island in islands.items() if island.jobs}
        if not self.islands:
            raise ConfigError("no island of the file names its Jobs API", "give one jobs: http://HEAD:8265")
        self._kept = {
            name: KeptJob(JobsAPI(name, island.jobs or "", island.token_file), run_url, name, entrypoint(island))
            for name, island in self.islands.items()
        }
        self._every = every
        self._seen: dict[str, IslandJob] = {}
        self._broken: list[BaseException] = []
        self._news, self._closing = threading.Condition(), threading.Event()

    def __enter__(self) -> Self:
        for name, kept in self._kept.items():
            # A daemon, so that an island that doesn't answer can't delay the end of the process.
            threading.Thread(target=self._watch, args=(name, kept), name=f"island {name}", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()

    def look(self, seconds: float = 10.0) -> list[IslandJob]:
        """The last known state of each island, in order. The first call waits for answers for at most `seconds`."""
        with self._news:
            self._news.wait_for(lambda: self._broken or len(self._seen) == len(self._kept), seconds)
            if self._broken:
                raise self._broken[0]
            asked = {name: IslandJob(name, "away", text="no answer yet") for name in self._kept}
            return list((asked | self._seen).values())

    def _watch(self, name: str, kept: KeptJob) -> None:
        while not self._closing.is_set():
            try:
                seen = kept.look()
            except BaseException as error:  # an error of this program, which the next `look` raises
                with self._news:
                    self._broken.append(error)
                    self._news.notify_all()
                raise
            with self._news:
                self._seen[name] = seen
                self._news.notify_all()
            self._closing.wait(self._every)
