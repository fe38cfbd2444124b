"""Progress of a training job, from what its attempts wrote to storage: heartbeats, failures, milestones, states."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ddm_ray.errors import DDMError, Left, Overtaken, Preempted, Stopped
from ddm_ray.jobs.attempts import Attempt, read_failure
from ddm_ray.jobs.job_files import JobFiles, list_jobs
from ddm_ray.jobs.launches import Launch, has_given_up, lives, place_of
from ddm_ray.run.graph import Artifact
from ddm_ray.store.store import Store

MAX_BEAT_SECONDS, MAX_LEASE_SECONDS = 60.0, 3600.0
"""Longest pause between beats that a heartbeat may announce, and longest lease of an attempt with slow steps."""
START_SECONDS = 600.0
"""Time for which a living launch may have no attempt. Ray or its nodes start then, and there is no heartbeat."""


@dataclass(frozen=True)
class JobStatus:
    """A job from the point of view of one attempt, usually the newest.

    `attempt` is 0 before the first attempt. `heartbeat`: the last heartbeat, with the `attempt` that wrote it; before
    the first attempt, the record of the launch. `in_vain`: why a launch after the newest attempt ended without an
    attempt. `beside`: the status by the newest attempt, if `attempt` is an older one that an observer has seen training
    while the newest gives no sign of life. `milestone`: step of the latest published weights, or None. `saved`: step
    of the state from which the next attempt continues, or 0. `files`: the listing that this was read from. `lives`: for
    a launch without an attempt, whether its command runs on this machine; None if that isn't known.
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
        """The counter in the attempt's heartbeat; None before the first."""
        return self.heartbeat.get("beat") if self.beats else None

    @property
    def sign(self) -> int | str | None:
        """The value that changes while the job lives: `beat`, or the launch's id before the first attempt."""
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
        """Words on where the attempt runs; empty if neither island nor Ray job is known, as on a laptop."""
        known = self.beats and not self.heartbeat.keys().isdisjoint(("island", "job"))
        return place_of(self.heartbeat) if known else ""

    @property
    def left(self) -> bool:
        """True if the attempt left with its state saved, or was overtaken. Another one follows."""
        kinds = (Preempted.__name__, Overtaken.__name__, Left.__name__)
        return self.failure is not None and self.failure["kind"] in kinds

    @property
    def stopped(self) -> bool:
        """True if the attempt ended by a stop request on storage. Its launch begins no other."""
        return self.failure is not None and self.failure["kind"] == Stopped.__name__

    @property
    def between(self) -> bool:
        """True from the end of a preempted attempt until the next one trains: usually 15 seconds, with few beats."""
        return self.phase in ("starting", "leaving")

    @property
    def unsaved(self) -> str:
        """Why newer states couldn't be saved; empty if they were."""
        return self.heartbeat.get("unsaved", "") if self.beats else ""

    @property
    def uncompiled(self) -> str:
        """Words on why the model couldn't be compiled, which makes training slow; empty if it was, or wasn't to be."""
        why = self.heartbeat.get("uncompiled", "") if self.beats else ""
        return f"uncompiled: {why}" if why else ""

    @property
    def heldout(self) -> str:
        """Words on the held-out loss, or on why none is measured; empty before the first measurement."""
        if (why := self.heartbeat.get("unmeasured")) and self.beats:
            return f"no held-out loss: {why}"
        loss, step = self.value("heldout_loss"), _count(self.heartbeat.get("heldout_step"))
        return "" if loss is None else heldout_in_words(loss, step)

    @property
    def step(self) -> int:
        """Finished steps by the attempt's heartbeat; before the first one, by the state from which it continues."""
        step = _count(self.heartbeat.get("step")) if self.beats else None
        return self.saved if step is None else step

    @property
    def steps(self) -> int | None:
        """Steps of the whole job; None before any attempt's first heartbeat."""
        return _count(self.heartbeat.get("steps"))

    def lease_seconds(self, least: float) -> float:
        """Length of the lease, at least `least`. A launch has no heartbeat before its first attempt: START_SECONDS."""
        if not self.attempt:
            return max(least, START_SECONDS)
        return lease_of(self.heartbeat if self.beats else {}, least)

    def value(self, name: str) -> float | None:
        """A number in the attempt's heartbeat (loss, mfu, world_size ...); None if it has none of that name."""
        return _number(self.heartbeat, name) if self.beats else None


def lease_of(heartbeat: Mapping[str, Any], least: float) -> float:
    """Seconds of an attempt's lease: three beats or steps, since beats come between steps, and at least `least`."""
    rate, pause = _number(heartbeat, "steps_per_second"), _number(heartbeat, "beat_seconds") or 0.0
    pause = min(max(pause, 0.0), MAX_BEAT_SECONDS) if pause == pause else 0.0
    return max(least, 3 * pause, min(MAX_LEASE_SECONDS, 3 / rate) if rate and rate > 0 else 0.0)


def _number(heartbeat: Mapping[str, Any], name: str) -> float | None:
    number = heartbeat.get(name)
    return number if isinstance(number, int | float) and not abs(number) > 1e300 else None


def heldout_in_words(loss: float, step: int | None = None) -> str:
    """Words on a held-out loss. Its weights are others than those of the training loss beside it, so they are named.

    `step`: that of the weights, if it isn't the last one.
    """
    return f"held out {loss:.4f} (EMA weights{'' if step is None else f' of step {step}'})"


def _count(given: Any) -> int | None:
    """A number of steps in a heartbeat, if it is valid."""
    return given if isinstance(given, int) and 0 <= given < 2**53 else None


def job_status(store: Store, job: Artifact, files: JobFiles | None = None) -> JobStatus | None:
    """The status of a job by its listed files; None if it was never launched."""
    files = files or list_jobs(store, [job])[job]
    launch = _last_launch(store, files)
    if not files.attempts:
        return launch
    # An attempt that has just begun has no heartbeat yet. Until then the one before it shows the job's progress.
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
    """The job's status by the launch that began last; None if an attempt has begun since."""
    newest = max(files.attempts, default=0)
    if files.last_launch is None or files.last_launch[1] != newest:
        return None
    launch = Launch(files.artifact, files.last_launch[0], after=newest)
    note = read_failure(store, launch.given_up_key) if has_given_up(files, launch.id) else None
    failure = {**note, "attempt": newest, "final": not DDMError.from_fields(note).passes} if note else None
    begun = launch.begun(store)
    return JobStatus(newest, {**begun, "attempt": newest}, failure, None, 0, files=files, lives=lives(begun))


def _failure(store: Store, files: JobFiles) -> dict[str, Any] | None:
    """Why the newest attempt ended, if it noted that."""
    newest = files.attempts[-1]
    attempt = Attempt(store, files.artifact, newest)
    failure = attempt.failure() if files.failed(newest) else None
    if (
        failure
        and failure["kind"] not in (Stopped.__name__, Left.__name__)
        and has_given_up(files, str(attempt.claim().get("launch")))
    ):
        failure |= {"error": f"{failure['error']}; given up", "final": True}
    return {**failure, "attempt": newest} if failure else None
