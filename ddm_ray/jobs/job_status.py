"""Progress of a training job, read from what its attempts left on storage: heartbeats, failures, milestones, states."""

from dataclasses import dataclass, field
from typing import Any

from ddm_ray.errors import DDMError, Preempted, Stopped
from ddm_ray.jobs.attempts import Attempt, read_failure
from ddm_ray.jobs.job_files import JobFiles, list_jobs
from ddm_ray.jobs.launches import Launch, has_given_up, lives, place_of
from ddm_ray.run.graph import Artifact
from ddm_ray.store.store import Store

MAX_BEAT_SECONDS, MAX_LEASE_SECONDS = 60.0, 3600.0
"""Longest pause between two beats that a heartbeat may announce, and longest lease of an attempt of slow steps."""
START_SECONDS = 600.0
"""Time for which a launch that lives may have no attempt: Ray starts meanwhile, or nodes do, and nothing beats."""


@dataclass(frozen=True)
class JobStatus:
    """A job as one attempt tells of it, mostly the newest. `heartbeat`: the last, with the `attempt` it is of.

    `attempt` is 0 until the first one, and `heartbeat` is then the record of the launch. `in_vain`: why a launch ended
    that was to go on after the newest attempt, and began none. `beside`: the job as its newest attempt tells of it,
    where `attempt` is an older one, which an observer has seen to train on while the newest gives no sign of life.
    `milestone` and `saved`: steps of the furthest published weights (None: none) and of the state that the next
    attempt goes on from (0: none). `files`: the listing that told of it. `lives`: of a launch without an attempt,
    whether its command is at work on this machine, where that can be known.
    """

    attempt: int
    heartbeat: dict[str, Any]
    failure: dict[str, Any] | None
    milestone: int | None
    saved: int
    in_vain: str = ""
    beside: "JobStatus | None" = None
    files: JobFiles | None = field(default=None, compare=False, repr=False)
    lives: bool | None = None

    @property
    def beats(self) -> bool:
        """True if the attempt has written a heartbeat."""
        return self.heartbeat.get("attempt") == self.attempt

    @property
    def beat(self) -> int | None:
        """The counter of the attempt's heartbeat; None before its first."""
        return self.heartbeat.get("beat") if self.beats else None

    @property
    def sign(self) -> int | str | None:
        """Fact that an observer sees change while it lives: `beat`; before the first attempt the launch's id."""
        launch = self.files.last_launch if self.files and not self.attempt else None
        return launch[0] if launch else self.beat

    @property
    def phase(self) -> str:
        """Phase of the attempt: starting, compiling, training and so on, leaving."""
        if self.left:
            return "leaving"
        return self.heartbeat.get("phase", "training") if self.beats else "starting"

    @property
    def place(self) -> str:
        """Words on where the attempt runs; empty where neither island nor job is known, as on a laptop."""
        known = self.beats and not self.heartbeat.keys().isdisjoint(("island", "job"))
        return place_of(self.heartbeat) if known else ""

    @property
    def left(self) -> bool:
        """True if the attempt ended because it was asked to, with nothing lost: another one is to follow."""
        return self.failure is not None and self.failure["kind"] == Preempted.__name__

    @property
    def stopped(self) -> bool:
        """True if the attempt ended because somebody asked for it on storage: its launch begins no other."""
        return self.failure is not None and self.failure["kind"] == Stopped.__name__

    @property
    def between(self) -> bool:
        """True from the end of an attempt that left until the next one trains: mostly 15 seconds, with few beats."""
        return self.phase in ("starting", "leaving")

    @property
    def unsaved(self) -> str:
        """Why states since the last saved one aren't saved; empty if they are."""
        return self.heartbeat.get("unsaved", "") if self.beats else ""

    @property
    def uncompiled(self) -> str:
        """Words on why it trains uncompiled, and so slowly; empty where it doesn't, or where that was asked for."""
        why = self.heartbeat.get("uncompiled", "") if self.beats else ""
        return f"uncompiled: {why}" if why else ""

    @property
    def heldout(self) -> str:
        """Words on the held-out loss, or on why none is measured; empty before the first measurement."""
        if (why := self.heartbeat.get("unmeasured")) and self.beats:
            return f"no held-out loss: {why}"
        return "" if (loss := self.value("heldout_loss")) is None else f"held out {loss:.4f}"

    @property
    def step(self) -> int:
        """Steps done by the attempt's heartbeat; before its first, those of the state that it goes on from."""
        step = _count(self.heartbeat.get("step")) if self.beats else None
        return self.saved if step is None else step

    @property
    def steps(self) -> int | None:
        """Steps of the whole job; None before any attempt's first heartbeat."""
        return _count(self.heartbeat.get("steps"))

    def lease_seconds(self, least: float) -> float:
        """Length of its lease: three of its beats or steps, since it beats between steps; `least` at least.

        A launch is silent from its beginning to its first attempt: its lease is START_SECONDS.
        """
        if not self.attempt:
            return max(least, START_SECONDS)
        rate, pause = self.value("steps_per_second"), self.value("beat_seconds") or 0.0
        pause = min(max(pause, 0.0), MAX_BEAT_SECONDS) if pause == pause else 0.0
        return max(least, 3 * pause, min(MAX_LEASE_SECONDS, 3 / rate) if rate and rate > 0 else 0.0)

    def value(self, name: str) -> float | None:
        """A number of the attempt's heartbeat (loss, mfu, world_size ...); None if it has none of that name."""
        number = self.heartbeat.get(name) if self.beats else None
        return number if isinstance(number, int | float) and not abs(number) > 1e300 else None


def _count(given: Any) -> int | None:
    """A number of steps that a heartbeat tells, if it can be one."""
    return given if isinstance(given, int) and 0 <= given < 2**53 else None


def job_status(store: Store, job: Artifact, files: JobFiles | None = None) -> JobStatus | None:
    """Progress of the job, from its listed files; None if it was never launched."""
    files = files or list_jobs(store, [job])[job]
    launch = _last_launch(store, files)
    if not files.attempts:
        return launch
    # One that has just begun has no heartbeat yet: until then the one before it tells of the job.
    beating = [number for number in files.attempts if files.beats(number)]
    return JobStatus(
        attempt=files.attempts[-1],
        heartbeat=Attempt(store, job, beating[-1]).last_beat() if beating else {},
        failure=_failure(store, files),
        milestone=files.published,
        saved=files.saved[1],
        in_vain=f"launched again{place_of(launch.heartbeat)}, in vain: {launch.failure['error']}"
        if launch and launch.failure
        else "",
        files=files,
    )


def _last_launch(store: Store, files: JobFiles) -> JobStatus | None:
    """The job as the launch that began last left it; None if an attempt has been begun since."""
    newest = max(files.attempts, default=0)
    if files.last_launch is None or files.last_launch[1] != newest:
        return None
    launch = Launch(files.artifact, files.last_launch[0], after=newest)
    note = read_failure(store, launch.given_up_key) if has_given_up(files, launch.id) else None
    failure = {**note, "attempt": newest, "final": not DDMError.from_fields(note).passes} if note else None
    begun = launch.begun(store)
    return JobStatus(newest, {**begun, "attempt": newest}, failure, None, 0, files=files, lives=lives(begun))


def _failure(store: Store, files: JobFiles) -> dict[str, Any] | None:
    """Why the newest attempt ended, if it said so."""
    newest = files.attempts[-1]
    attempt = Attempt(store, files.artifact, newest)
    failure = attempt.failure() if files.failed(newest) else None
    if failure and failure["kind"] != Stopped.__name__ and has_given_up(files, str(attempt.claim().get("launch"))):
        failure |= {"error": f"{failure['error']}; given up", "final": True}
    return {**failure, "attempt": newest} if failure else None
