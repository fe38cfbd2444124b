"""A question to islands before a run is trained on them: a job on each looks around, and its report comes back."""

import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from threading import Event

from ddm_ray.errors import ConfigError, RayAway, RayError, StorageError
from ddm_ray.islands.faults import Answer
from ddm_ray.islands.jobs import JobsAPI, SubmittedJob
from ddm_ray.islands.probe import CLOCK, MARK, MOST_DIGESTS, MOST_REPORT, NOTE, PREFIX, REPORT, Note, ProbeReport
from ddm_ray.models.hub import encoders_in_training
from ddm_ray.placement import Island
from ddm_ray.storage.graph import shards_of
from ddm_ray.storage.run import Run

LONGEST_SECONDS = 150.0
"""Time after which a probe that hasn't ended is ended."""
LOOK_SECONDS = 0.5
_LOG_LINES = 200


def note_of(run: Run) -> Note:
    """The note for islands: digests by which they know copies of the run's shards, and text encoders of trainings."""
    manifests = [run.manifest(shard) for shard in shards_of(run.config)[:MOST_DIGESTS]]
    digests = [manifest.digest for manifest in manifests if manifest]
    return Note(digests=digests, encoders=encoders_in_training(run.config))


class Question:
    """A question to one island, with a note and its answer in a folder of the run that is deleted in the end."""

    def __init__(self, run: Run, island: Island, note: Note, probe: Callable[[str], str], interrupted: Event):
        """`probe` gives the line of shell that answers the question of this id; once `interrupted` nobody waits."""
        self._run, self._island, self._note, self._probe = run, island, note, probe
        self._interrupted = interrupted
        self._id = secrets.token_hex(8)
        self._job = f"ddm-check-{self._id}"
        self._folder = PREFIX.format(self._id)
        self._jobs = JobsAPI(island.name, island.jobs or "", island.token_file)
        self._bounds = (0.0, 0.0)

    def ask(self, seconds: float = LONGEST_SECONDS) -> Answer:
        """The island's answer, after so many seconds at most and the time of some requests.

        Raises StorageError where the run's storage refuses here.
        """
        answer = Answer()
        try:
            strangers = self._jobs.answers_strangers()
            answer = Answer(reached=True, open=strangers is True)
            if isinstance(strangers, str):
                self._jobs.job(self._job)  # whether it is a Jobs API to who has the token
                answer = replace(answer, odd=strangers)
        except (RayError, ConfigError) as error:
            return replace(answer, refused=error)
        store = self._run.store
        store.write(f"{self._folder}/{NOTE}", self._note.model_dump_json().encode())
        try:
            return self._answered(answer, time.monotonic() + seconds)
        finally:
            with suppress(StorageError):  # nobody minds a few bytes
                store.delete(self._folder)

    def _answered(self, answer: Answer, deadline: float) -> Answer:
        job = None
        try:
            began = time.time()
            try:
                self._submit(deadline)
                job = self._ended(began, deadline)
            finally:
                if job is None or not job.ended:
                    with suppress(RayError, ConfigError):
                        self._jobs.stop(self._job)
            stored = self._stored()
            log = [] if stored else self._jobs.log_tail(self._job, _LOG_LINES, MOST_REPORT)
        except (RayError, ConfigError) as error:
            return replace(answer, refused=error)
        printed = [line.removeprefix(MARK) for line in log if line.startswith(MARK)]
        report = stored or (ProbeReport.from_json(printed[-1]) if printed else None)
        answer = replace(answer, job=job, log=log, late=not job.ended, report=report, stored=stored is not None)
        return replace(answer, ahead=clock_bounds(report.clock, self._bounds)) if report else answer

    def _submit(self, deadline: float) -> None:
        while True:
            try:
                self._jobs.submit(self._probe(self._id), self._job)
                return
            except RayAway:
                # It answers some seconds before it takes jobs.
                if not self._waits(deadline):
                    raise

    def _ended(self, began: float, deadline: float) -> SubmittedJob:
        """The job once it has ended or its time is up; meanwhile CLOCK is waited for."""
        unseen, seen = began, 0.0
        while True:
            asked = time.time()
            if not seen and self._run.store.exists(f"{self._folder}/{CLOCK}"):
                seen = time.time()
            elif not seen:
                unseen = asked
            try:
                job, waits = self._jobs.job(self._job), self._waits(deadline)
            except RayAway:
                if not self._waits(deadline):
                    raise
                continue
            if job is None:
                raise RayAway(f"island {self._island.name}: its Ray has lost the probe")
            if job.ended or not waits:
                self._bounds = (unseen, seen) if seen else (began, time.time())
                return job

    def _waits(self, deadline: float) -> bool:
        """Wait for a moment; False where there is none left."""
        return not self._interrupted.wait(LOOK_SECONDS) and time.monotonic() < deadline

    def _stored(self) -> ProbeReport | None:
        try:
            data = self._run.store.read(f"{self._folder}/{REPORT}", MOST_REPORT)
        except FileNotFoundError:
            return None
        return ProbeReport.from_json(data.decode(errors="replace"))


def clock_bounds(there_read: tuple[float, float], here_read: tuple[float, float]) -> tuple[float, float]:
    """Bounds of an island's clock less the one here, in seconds.

    CLOCK came to be between two readings of either: of the island's before and after it created it, of this one before
    a look that saw none and after the look that saw it.
    """
    (before, after), (unseen, seen) = there_read, here_read
    return before - seen, after - unseen
