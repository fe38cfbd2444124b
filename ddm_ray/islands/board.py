"""The board: what one worker of an island sees on storage of the run's training jobs, and of all workers, itself too.

Who lives is judged by this observer's own clock. What it hasn't seen moving for longer than the grace time is free.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from ddm_ray.errors import ConfigError, CorruptArtifact, DriftError
from ddm_ray.islands.choose import OpenJob, Worker
from ddm_ray.islands.presence import Presence, forget, workers
from ddm_ray.storage.attempts import Attempt
from ddm_ray.storage.graph import Artifact
from ddm_ray.storage.job_files import TAKES, JobFiles, list_jobs
from ddm_ray.storage.notes import Take, read_note
from ddm_ray.storage.observer import LIST_SECONDS as MOST_LIST_SECONDS
from ddm_ray.storage.observer import Observer
from ddm_ray.storage.pulse import Pulses
from ddm_ray.storage.run import Run
from ddm_ray.storage.status import Status, duration, status
from ddm_ray.storage.stops import asked, drain_key, stop_key
from ddm_ray.train.job import train_job

LIST_SECONDS, LACK_SECONDS = 10.0, 30.0
"""Pause between two listings while a job is silent, and between two looks for inputs that are missing."""
ROOM_SECONDS = 600.0
"""Time after which a job whose worker lives is free all the same, if nothing trains it: its nodes don't come, or its
start hangs."""


@dataclass(frozen=True)
class View:
    """All that a worker chooses by: jobs that are unfinished, workers that live, and the statuses behind them.

    `drained`: who asked that the island takes nothing; None: nobody. `ahead`: an older living worker of the same
    island, which goes first; None: there is none.
    """

    statuses: list[Status]
    jobs: list[OpenJob]
    workers: list[Worker]
    drained: str | None
    ahead: Presence | None

    @property
    def finished(self) -> bool:
        """True once nothing is left to train."""
        return not self.jobs


class Board:
    """Looks at `artifacts` of a run for one worker, as often as it is asked to.

    `work_of` tells the FLOP of an artifact's whole training.
    """

    def __init__(
        self,
        run: Run,
        artifacts: Sequence[Artifact],
        grace: float,
        work_of: Callable[[Artifact], float],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._run, self._artifacts, self._grace = run, artifacts, grace
        self._work_of, self._clock = work_of, clock
        self._files: dict[Artifact, JobFiles] = {}
        self._observer = Observer(run, self._list, least=LIST_SECONDS)
        self._pulses, self._held, self._damaged, self._now = Pulses(), Pulses(), Pulses(), 0.0
        self._lost: dict[Artifact, tuple[int, float]] = {}
        self._ready, self._lacks = set[Artifact](), dict[Artifact, tuple[str, float]]()

    def look(self, me: Presence) -> View:
        """The run as it is now, for the worker with this presence. Raises StorageError."""
        now = self._now = self._clock()
        # Takes are listed before presences are read: whoever takes a job says so in its presence first.
        statuses = self._observer.look(now)
        known = [each for each in workers(self._run.store) if each.id != me.id]
        others = [each for each in known if self._lives(each, now)]
        ahead = [each for each in others if each.island == me.island and each.number < me.number]
        for dead in known:
            if dead.island == me.island and dead.number < me.number and dead not in others:
                forget(self._run.store, dead)
        living = [me, *others]
        by_island = {each.island: each for each in sorted(living, key=_number, reverse=True)}
        self._forget_losses(statuses, now, alone=len(by_island) == 1)
        return View(
            statuses,
            [self._job(each, living, me.id) for each in statuses if each.state != "finished"],
            [Worker(each.id, each.speed, each.only, each.failed) for each in by_island.values()],
            asked(self._run.store, drain_key(me.island)),
            ahead[0] if ahead else None,
        )

    def list_next(self) -> None:
        """Have the next look list what there is."""
        self._observer.list_next()

    def lose(self, artifact: Artifact) -> None:
        """Count a job that another worker has taken from this one, since nothing trained it here."""
        self._lost[artifact] = self._files[artifact].takes, self._clock()

    @property
    def lost(self) -> frozenset[Artifact]:
        """Jobs that were lost and are left to others for now.

        Else workers without room would pass a job round, beside others that have some. A job isn't tried again for a
        whole turn after its newest take, so that whoever hasn't had it comes first.
        """
        return frozenset(self._lost)

    def _forget_losses(self, statuses: Sequence[Status], now: float, alone: bool) -> None:
        for known in statuses:
            if known.artifact not in self._lost:
                continue
            takes, since = self._lost[known.artifact]
            if takes != self.takes(known.artifact):
                self._lost[known.artifact] = self.takes(known.artifact), now
            elif alone or now - since > self._patience(known) + 2 * self._grace + MOST_LIST_SECONDS:
                del self._lost[known.artifact]

    def _patience(self, known: Status) -> float:
        """Longest silence of a job that a living worker holds, which isn't crowded."""
        return max(ROOM_SECONDS, known.job.patience(self._grace) if known.job else 0.0)

    def takes(self, artifact: Artifact) -> int:
        """Number of the artifact's newest take, as far as is known; 0: none."""
        return self._files[artifact].takes

    def _list(self, known: Sequence[Status]) -> list[Status]:
        self._files = list_jobs(self._run.store, self._artifacts)
        finished = {each.artifact: each for each in known if each.state == "finished"}
        return [finished.get(each) or status(self._run, each, self._files[each]) for each in self._artifacts]

    def _lives(self, presence: Presence, now: float) -> bool:
        silence = self._pulses.take(presence.id, 0, presence.beat, now)
        return not presence.ended and silence <= max(self._grace, 3 * presence.beat_seconds)

    def _job(self, known: Status, living: Sequence[Presence], me: str) -> OpenJob:
        artifact = known.artifact
        work = max(1.0, self._work_of(artifact) * (1.0 - known.fraction))
        if self._files[artifact].stopped:
            return OpenJob(artifact, work, obstacle=f"is stopped, {asked(self._run.store, stop_key(artifact))}")
        # Asked of a sound one, too: a later damage begins anew.
        if not self._only_its_heartbeat(known) and known.state == "damaged":
            return OpenJob(artifact, work, obstacle=f"is damaged: {known.error}")
        if owner := self._owner(known, living, me):
            return OpenJob(artifact, work, owner)
        return OpenJob(artifact, work, obstacle=self._lack(artifact))

    def _owner(self, known: Status, living: Sequence[Presence], me: str) -> str:
        """Who trains it: a worker's id, or words on an attempt that no living worker holds; "" nobody."""
        job, silence = known.job, known.silent_seconds or 0.0
        holder = next((each for each in living if each.holds == known.artifact), None)
        if holder:
            # Its time begins with its take: what was silent before isn't its fault, or islands would take it in turns.
            sign = f"{self._files[known.artifact].takes} {holder.id} {job and job.sign}"
            silence = self._held.take(known.artifact, job.attempt if job else 0, sign, self._now)
            waits_long = silence > (self._grace if holder.crowded else self._patience(known))
            return "" if waits_long and holder.id != me else holder.id
        if job is None or known.state == "stopped" or silence > job.patience(self._grace):
            return ""
        if known.state == "failed" and job.failure and job.failure["final"]:
            return ""  # after any other failure its launch goes on, if that still lives
        if self._left(known.artifact):
            return ""
        who = f"attempt {job.attempt}{job.place}" if job.attempt else "a launch that begins"
        return who + (f", silent for {duration(silence)}" if known.silent else "")

    def _left(self, artifact: Artifact) -> bool:
        """True if it was begun last by a worker who trains it no more: who said so, or is silent and began no attempt.

        For an artifact that no living worker holds.
        """
        store, files = self._run.store, self._files[artifact]
        if not files.takes:
            return False
        with suppress(ValueError, ConfigError, CorruptArtifact):
            take = read_note(store, take_key(artifact, files.takes), Take) or {}
            newest, last = self._newest_attempt(files), files.last_launch
            if take.get("launch", "") != (newest.claim().get("launch") if newest else last and last[0]):
                return False  # somebody else's
            presence = Presence.read(store, take.get("worker", ""))
            return presence.ended or presence.beat is None or presence.holds != artifact or newest is None
        return False

    def _newest_attempt(self, files: JobFiles) -> Attempt | None:
        return Attempt(self._run.store, files.artifact, files.attempts[-1]) if files.attempts else None

    def _lack(self, artifact: Artifact) -> str:
        """Words on what has to be made before the artifact can be trained; "" where nothing is missing."""
        if artifact in self._ready:
            return ""
        lack, until = self._lacks.get(artifact, ("", -math.inf))
        if self._now < until:
            return lack
        lack = ""
        for needed in self._run.inputs(artifact):
            try:
                if not lack and not self._run.finished(needed, accepted=True):
                    wait = "accepted" if self._run.by_hand(needed) else "finished"
                    lack = f"needs {needed}, which isn't {wait}"
            except (DriftError, CorruptArtifact) as error:
                lack = f"needs {needed}, which is damaged: {error}"
        if lack:
            self._lacks[artifact] = lack, self._now + LACK_SECONDS
        else:
            self._ready.add(artifact)
        return lack

    def _only_its_heartbeat(self, known: Status) -> bool:
        """True if what can't be read is no more than what a dead attempt told: the next one needs none of it."""
        damage = isinstance(known.error, CorruptArtifact) and not self._files[known.artifact].committed
        lasts = self._damaged.take(known.artifact, 0, str(known.error) if damage else None, self._now)
        return damage and lasts > self._grace


def take_key(artifact: Artifact, number: int) -> str:
    """Key of an artifact's take of that number, which names the worker whose it is, and its launch."""
    return f"{artifact}/{TAKES}/{number:04d}"


def _number(presence: Presence) -> int:
    """Number among the workers of its island, of which the oldest one that lives works, and others stand by."""
    return presence.number


def work_of(run: Run) -> Callable[[Artifact], float]:
    """A function that tells the FLOP of an artifact's whole training; models of one kind are alike."""
    by_kind: dict[str, float] = {}

    def flops(artifact: Artifact) -> float:
        if artifact.kind not in by_kind:
            job = train_job(run, artifact)
            by_kind[artifact.kind] = float(job.training_flops(job.train.steps))
        return by_kind[artifact.kind]

    return flops
