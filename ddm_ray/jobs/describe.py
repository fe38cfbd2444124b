"""Sentences about the states of artifacts, for tables and for people. Untrusted text is made printable."""

import shutil
from collections.abc import Callable
from contextlib import suppress

from ddm_ray.errors import DDMError, Left
from ddm_ray.jobs.job_status import JobStatus, heldout_in_words
from ddm_ray.jobs.launches import place_of
from ddm_ray.jobs.status import SILENT_SECONDS, Status
from ddm_ray.remedies import Accept, Fix, Resume
from ddm_ray.run.info import PartitionInfo, TrainedInfo
from ddm_ray.spelling import duration, escape_unprintable, printable
from ddm_ray.store.store import is_local

NAMES = {"ari": "adjusted Rand index"}
"""Names of facts for people."""
BEAT_BYTES = 4096  # space that a heartbeat takes on a disk


def line(status: Status, phrase: Callable[[Fix], str] = str) -> str:
    """One line of a table on an artifact: its name, its state, the finished share, and `describe`."""
    return f"{status.artifact:<16} {status.word:<9} {status.fraction:4.0%}  {describe(status, phrase)}".rstrip()


def describe(status: Status, phrase: Callable[[Fix], str] = str, with_time_left: bool = True) -> str:
    """One line on an artifact: for a training job its step, loss, speed and time left, or why it failed.

    `phrase` puts remedies into words. Untrusted text is made printable.
    """
    waits = f"; {phrase(Accept(status.run, status.artifact))}" if status.unaccepted else ""
    return escape_unprintable(_described(status, phrase, with_time_left) + waits)


def _described(status: Status, phrase: Callable[[Fix], str], with_time_left: bool) -> str:
    info = status.info
    if isinstance(info, TrainedInfo):
        heldout = f", {heldout_in_words(info.heldout.loss)}" if info.heldout else ""
        heldout += f", no held-out loss: {printable(info.unmeasured, 300)}" if info.unmeasured else ""
        cost = f"{info.training_flops / 1e9:.1f} GFLOP in {duration(info.seconds)}"
        return f"{info.step} steps, loss {info.loss:.4f}{heldout}, {cost}"
    if info:
        facts = {key: f"{value:.3g}" if isinstance(value, float) else value for key, value in info}
        words = [f"{len(info.rows_K)} clusters"] if isinstance(info, PartitionInfo) else []
        words += [f"{NAMES.get(key, key)} {value}" for key, value in facts.items() if isinstance(value, int | str)]
        words += [f"{loss.rows} lost something: {loss.reason}" for loss in getattr(info, "losses", ())]
        return ", ".join(words)
    if status.error:
        return status.error.text(phrase)
    if job := status.job:
        again = phrase(Resume(status.run, status.artifact, job.saved, on_island=bool(job.heartbeat.get("island"))))
        if status.state in ("failed", "stopped"):
            return _failed(status, job, again, phrase)
        if not job.attempt:
            return _launched(status, job, again)
        if job.failure and job.failure["kind"] == Left.__name__ and status.may_be_dead:
            return f"{job.failure['error']}; {again}"
        if_dead = _older(status) + (f"; {job.in_vain}" if job.in_vain else f"; if it died, {again}")
        return _begun(status, job, with_time_left) + _beside(job) + (if_dead if status.may_be_dead else "")
    if chunks := status.chunks:
        parts = f", {chunks.chunks} parts" if status.artifact.kind == "rows" else ""
        return f"{chunks.units_done} of {chunks.units} {status.artifact.units}{parts}"
    return "waiting"


def _launched(status: Status, job: JobStatus, again: str) -> str:
    launched = f"launched{place_of(job.heartbeat)}"
    if job.lives is False:
        return f"{launched}, and that command has ended without an attempt; {again}"
    if job.lives:
        long = f" for {duration(status.silent_seconds or 0.0)}" if status.silent else " yet"
        return f"starting: {launched}, no attempt{long}"
    if status.silent:
        return f"waiting: no attempt for {duration(status.silent_seconds or 0.0)}, {launched}; if it died, {again}"
    unsure = f", and no sign of life before one; if it died, {again}" if status.unjudged else ""
    return f"waiting: {launched}, no attempt yet{unsure}"


def _failed(status: Status, job: JobStatus, again: str, phrase: Callable[[Fix], str]) -> str:
    assert job.failure
    why = DDMError.from_fields(job.failure).text(phrase)
    reached = [f"at step {job.step}/{job.steps}"] if job.steps else []
    which = f"attempt {job.attempt}{job.place}" if job.attempt else f"launched{place_of(job.heartbeat)}, no attempt"
    text = ", ".join([f"{status.state}: {why}", which, *reached]) + (f"; {job.in_vain}" if job.in_vain else "")
    text += _older(status)
    return f"{text}; {'once that is mended, ' if job.failure['final'] else ''}{again}"


def _older(status: Status) -> str:
    """Words on older attempts that may live while the newest may not."""
    return f"; attempt {' or '.join(map(str, sorted(status.older)))} may train on" if status.older else ""


def _beside(job: JobStatus) -> str:
    """Words on the newest attempt if an older one still trains."""
    newest = job.beside
    if newest is None:
        return ""
    how = "left" if newest.left else f"failed: {newest.failure['error']}" if newest.failure else "gives no sign of life"
    return f"; the newer attempt {newest.attempt}{newest.place} {how}"


def _begun(status: Status, job: JobStatus, with_time_left: bool) -> str:
    silence = status.silent_seconds or 0.0
    moves = job.phase == "training" and not status.may_be_dead
    loss, workers = job.value("loss"), job.value("world_size")
    rate, mfu = (job.value(name) for name in ("steps_per_second", "mfu"))
    parts = [_position(status, job, silence)]
    if job.unsaved:
        parts.append(f"not saved {f'since step {job.saved}' if job.saved else 'so far'}: {job.unsaved}")
    if loss is not None and job.phase != "starting":
        parts.append(f"loss {loss:.4f}")
    parts.append(job.heldout)
    if rate and moves:
        parts.append(f"{rate:.3g} steps/s")
    if silence > SILENT_SECONDS and not status.may_be_dead:
        parts.append(f"no sign for {duration(silence)}")
    if status.seconds_left is not None and moves and with_time_left:
        parts.append(f"{duration(status.seconds_left)} left")
    if workers:
        parts.append(f"{workers:g} worker{'s' if workers != 1 else ''}")
    if mfu is not None and moves:
        parts.append(f"MFU {mfu:.0%}")
    if moves:
        parts.append(job.uncompiled)
    if job.milestone:
        parts.append(f"weights of step {job.milestone}")
    if job.saved and moves and not job.unsaved:
        parts.append(f"saved at step {job.saved}")
    parts.append(f"attempt {job.attempt}{job.place}")
    return ", ".join(filter(None, parts))


def _position(status: Status, job: JobStatus, silence: float) -> str:
    """Words on the job's step. If the job may be dead, that comes first, so that no narrow terminal cuts it off."""
    where = f"step {job.step}/{job.steps}" if job.steps else ""
    if job.phase != "training":
        where = f"{job.phase} at {where}" if where else job.phase
    if not status.may_be_dead:
        return where
    sign = f"no sign for {duration(silence)} of looking" if status.unjudged else f"silent for {duration(silence)}"
    sign = f"no space left on the disk of {status.run}, {sign}" if _is_full(status.run) else sign
    return f"{sign}, {where}" if where else sign


def _is_full(run_url: str) -> bool:
    """True if a run's local disk has no room for a heartbeat, so that training processes can't report this."""
    with suppress(OSError):
        return is_local(run_url) and shutil.disk_usage(run_url).free < BEAT_BYTES
    return False
