"""Progress of the extensions of a run, by a few requests each: of what they hold only folders are listed."""

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

MOST, REQUESTS = 16, 8
"""Extensions that are looked at, the newest ones, and requests that are made side by side."""
EXPERTS = expert(0).partition("/")[0]


@dataclass(frozen=True)
class Reach:
    """A training job's steps that are done, of how many; None: none is known of. Finished once it is committed.

    `begun`: an attempt has told of itself.
    """

    artifact: Artifact
    step: int | None
    steps: int
    finished: bool
    begun: bool = True


@dataclass(frozen=True)
class ExtensionStatus:
    """Progress of the extension at a URL: its own training jobs, and where it `appends` files, what isn't made of them.

    `jobs` is None where it wasn't looked at, as the older ones of very many, or couldn't be, for the `error`.
    """

    url: str
    appends: int = 0
    lacks: Artifact | None = None
    jobs: tuple[Reach, ...] | None = None
    error: DDMError | None = None

    def words(self, phrase: Callable[[Fix], str] = str) -> str:
        """A line on it; empty where it wasn't looked at. `phrase` puts remedies into words."""
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
        """The same as numbers."""
        jobs = [
            {"artifact": str(job.artifact), "finished": job.finished, "step": job.step, "steps": job.steps}
            for job in self.jobs or ()
        ]
        error = self.error.to_fields() if self.error else None
        fields = {"url": self.url, "appends": self.appends, "lacks": self.lacks, "error": error}
        return {**fields, "jobs": None if self.jobs is None else jobs}


def extension_statuses(run: Run) -> list[ExtensionStatus]:
    """All extensions of a run, and those of each in turn, by URL; one that can't be read with its error.

    Of more than MOST the older ones are named alone, and theirs aren't looked for.
    Raises StorageError where those of the run itself can't be listed.
    """
    statuses, pending = list[ExtensionStatus](), extensions(run)
    while pending:
        url = pending.pop()
        if len(statuses) >= MOST:
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
    # One listing says which of many experts nobody has begun.
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
