"""Progress of the extensions of a run, from a few requests each. Only folders are listed, not their files."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ddm_ray.config.longer import train_of
from ddm_ray.errors import DDMError
from ddm_ray.jobs.attempts import heartbeat
from ddm_ray.jobs.extend import extensions
from ddm_ray.remedies import Fix
from ddm_ray.run.graph import EXTRAS, PARTITION, ROWS, Artifact, expert, part_of, trained_of
from ddm_ray.run.manifest import NAME
from ddm_ray.run.run import Run

MAX_READ, REQUESTS = 16, 8
"""Number of extensions, the newest ones, that are read, and of requests at a time."""
EXPERTS = expert(0).partition("/")[0]


@dataclass(frozen=True)
class Reach:
    """A training job's finished `step`, None if unknown, of how many `steps`. It is `finished` once it is committed.

    `begun`: an attempt has written a heartbeat.
    """

    artifact: Artifact
    step: int | None
    steps: int
    finished: bool
    begun: bool = True


@dataclass(frozen=True)
class ExtensionStatus:
    """Progress of the extension at a URL: its own training jobs, and if it `appends` files, which artifact it `lacks`.

    `jobs` is None if the extension wasn't read, because there are too many or because of the `error`.
    """

    url: str
    appends: int = 0
    lacks: Artifact | None = None
    jobs: tuple[Reach, ...] | None = None
    error: DDMError | None = None

    def words(self, phrase: Callable[[Fix], str] = str) -> str:
        """One line on the extension; empty if it wasn't read. `phrase` puts remedies into words."""
        if self.error:
            return self.error.text(phrase)
        if self.jobs is None:
            return ""
        parts = []
        if self.appends:
            made = f"{self.lacks} not made yet" if self.lacks else "rows and partition made"
            parts.append(f"{self.appends:,} more file{'s' if self.appends > 1 else ''}, {made}")
        experts = [job for job in self.jobs if job.artifact.kind == "expert"]
        others = [[job] for job in self.jobs if job.artifact.kind != "expert"]
        parts += [_words(group) for group in (experts, *others) if group]
        return "; ".join(parts) or "nothing of its own to train"

    def as_json(self) -> dict[str, Any]:
        """The status as fields for JSON."""
        jobs = [
            {"artifact": str(job.artifact), "finished": job.finished, "step": job.step, "steps": job.steps}
            for job in self.jobs or ()
        ]
        error = self.error.to_fields() if self.error else None
        fields = {"url": self.url, "appends": self.appends, "lacks": self.lacks, "error": error}
        return {**fields, "jobs": None if self.jobs is None else jobs}


def extension_statuses(run: Run) -> list[ExtensionStatus]:
    """All extensions of a run, and their extensions in turn, by URL. One that can't be read has an error.

    If there are more than MAX_READ, the older ones have only a URL, and their extensions aren't listed. Raises
    StorageError if the extensions of the run itself can't be listed.
    """
    statuses, pending = list[ExtensionStatus](), extensions(run)
    while pending:
        url = pending.pop()
        if len(statuses) >= MAX_READ:
            statuses.append(ExtensionStatus(url))
            continue
        try:
            extension = Run.open(url)
            later, own = extensions(extension), _look(extension)
        except DDMError as error:
            statuses.append(ExtensionStatus(url, error=error))
        else:
            statuses.append(own)
            pending += later
    return sorted(statuses, key=lambda status: status.url)


def _look(run: Run) -> ExtensionStatus:
    own = [job for job in trained_of(run.config) if not run.inherits(job)]
    # One listing shows which of many experts have begun.
    begun = {f"{EXPERTS}/{name}" for name in run.store.folders(EXPERTS)}
    made = run.appends is None or [run.store.exists(f"{artifact}/{NAME}") for artifact in (ROWS, PARTITION)]
    lacks = None if made is True or all(made) else (PARTITION if made[0] else ROWS)

    def reach(job: Artifact) -> Reach:
        part = part_of(job)
        assert part
        steps = train_of(run.config, part).steps
        if job.kind == "expert" and job not in begun:
            return Reach(job, None, steps, False, False)
        if run.store.exists(f"{job}/{NAME}"):
            return Reach(job, steps, steps, True)
        beat = heartbeat(run.store, job)
        step = beat.get("step") if beat else None
        done = min(step, steps) if isinstance(step, int) and step >= 0 else None
        return Reach(job, done, steps, False, beat is not None)

    with ThreadPoolExecutor(REQUESTS) as pool:
        every = list(pool.map(reach, own))
    jobs = tuple(job for job in every if job.artifact.kind not in EXTRAS or job.begun)
    return ExtensionStatus(run.url, run.appends.files if run.appends else 0, lacks, jobs)


def _words(jobs: list[Reach]) -> str:
    """Words on the experts, or on one other job."""
    steps = [job.step for job in jobs if job.step is not None and not job.finished]
    at = f"{min(steps)} to {max(steps)}" if len({*steps}) > 1 else f"{min(steps, default=0)}"
    words = {
        "finished": sum(job.finished for job in jobs),
        f"at step {at}/{jobs[0].steps}": len(steps),
        "starting": sum(job.step is None and job.begun for job in jobs),
        "waiting": sum(not job.begun for job in jobs),
    }
    if jobs[0].artifact.kind != "expert":
        return f"{jobs[0].artifact} {next(word for word, count in words.items() if count)}"
    return f"{EXPERTS}: " + ", ".join(f"{count} {word}" for word, count in words.items() if count)
