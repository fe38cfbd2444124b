"""Launches: a launch is one command that finishes one training job, with as many attempts as that takes.

A launch writes below `<artifact>/launches/<id>/`: a record of where it began, one of each failure, and one if it gives
up. The claims of its attempts have its id. Everything here follows from a listing and small files that are read once.
"""

import json
import os
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from ddm_ray.errors import CorruptArtifact, DDMError, GaveUp, Left, StorageError, TrainingError
from ddm_ray.jobs.attempts import OUT_OF_MEMORY, Attempt, claimed, read_failure
from ddm_ray.jobs.job_files import BEGUN, JobFiles, list_jobs
from ddm_ray.jobs.notes import Begun, read_note
from ddm_ray.run.graph import Artifact
from ddm_ray.spelling import one_line, printable
from ddm_ray.store.checksummed import read_some
from ddm_ray.store.retries import NO_RETRIES
from ddm_ray.store.store import Store

LOSS_BYTES, LOSS_LETTERS = 4096, 300
"""Largest number of bytes that are read of the record of a lost attempt, and of characters that are shown."""


@dataclass(frozen=True)
class Launch:
    """One launch of the job that makes `artifact`, with its `island` and Ray `job` if these are known.

    `after`: number of the job's newest attempt when the launch began.
    """

    artifact: Artifact
    id: str = field(default_factory=lambda: f"{time.time_ns() // 10**6:011x}{uuid4().hex[:8]}")  # newer ones sort last
    island: str = ""
    job: str = ""
    after: int = 0

    @property
    def prefix(self) -> str:
        """Key prefix of everything that the launch itself writes."""
        return f"{self.artifact}/launches/{self.id}"

    @property
    def given_up_key(self) -> str:
        """Key of the record that the launch has given up, and why."""
        return f"{self.prefix}/GIVEN_UP"

    @property
    def begun_key(self) -> str:
        """Key of the record that the launch has begun, and where."""
        return f"{self.prefix}/{BEGUN}{self.after:04d}"

    @property
    def place(self) -> dict[str, str]:
        """Island and Ray job, if they are known."""
        return {name: value for name, value in {"island": self.island, "job": self.job}.items() if value}

    def begun(self, store: Store) -> dict[str, Any]:
        """The record that the launch has begun; empty if it can't be read."""
        with suppress(CorruptArtifact):
            return read_note(store, self.begun_key, Begun) or {}
        return {}

    def claim_fields(self) -> dict[str, str]:
        """Fields of the launch for the claims of its attempts."""
        return {"launch": self.id, **self.place}

    def give_up(self, store: Store, error: DDMError) -> None:
        """Record that this launch gives up, and why. The first reason counts."""
        store.create(self.given_up_key, json.dumps(error.to_fields()).encode())


def place_of(fields: Mapping[str, Any]) -> str:
    """Words on where an attempt runs, by its claim or heartbeat: ` on island north, host n7, job raysubmit_7`."""
    words = [f"{name} {printable(fields[name], 100)}" for name in ("island", "host", "job") if fields.get(name)]
    return f" on {', '.join(words)}" if words else ""


def has_given_up(files: JobFiles, launch_id: str) -> bool:
    """True if the launch of this id has given up."""
    # In older versions the id of a launch was the key of that record.
    key = launch_id if "/" in launch_id else Launch(files.artifact, launch_id).given_up_key
    return key.removeprefix(f"{files.artifact}/") in files.sizes


def failures_in_a_row(files: JobFiles, launch_id: str) -> int:
    """Number of failures of this launch since the job's newest state was committed."""
    return sum(key.startswith(_failures(launch_id, files.saved)) for key in files.sizes)


def attempts_of(launch_id: str, claims: Mapping[int, Mapping[str, Any]]) -> list[int]:
    """Numbers of the launch's attempts, ascending, among all claims."""
    return sorted(number for number, claim in claims.items() if claim.get("launch") == launch_id)


def _failures(launch_id: str, saved: tuple[int, int]) -> str:
    """Key prefix, below the artifact, of failures since the state of this attempt and step was committed."""
    return f"{_all_failures(launch_id)}{saved[0]:04d}-{saved[1]:09d}/"


def _all_failures(launch_id: str) -> str:
    """Key prefix, below the artifact, of all failures of this launch."""
    return f"launches/{launch_id}/failures/"


@contextmanager
def noted(store: Store, launch: Launch) -> Iterator[Launch]:
    """Record on storage that a launch begins, and an error that ends it before its first attempt.

    Yields the launch with the number of the attempt after which it begins. If Ctrl-C ends it, or if it is left before
    its first attempt, the record is deleted.
    """
    files = list_jobs(store, [launch.artifact])[launch.artifact]
    launch = replace(launch, after=max(files.attempts, default=0))
    where = {**launch.place, "host": socket.gethostname(), "pid": os.getpid(), "processes": _processes()}
    store.write(launch.begun_key, json.dumps(where).encode())
    _drop_ended(store, files, launch.after, where)
    try:
        yield launch
    except KeyboardInterrupt:
        _forget(launch, store)
        raise
    except Exception as error:
        with suppress(StorageError):
            if max(claimed(store, launch.artifact), default=0) == launch.after:
                if isinstance(error, Left):
                    _forget(launch, store)
                else:
                    launch.give_up(store, error if isinstance(error, DDMError) else TrainingError(one_line(error, 500)))
        raise


def _forget(launch: Launch, store: Store) -> None:
    """Delete the record that a launch has begun, if storage answers at once."""
    with suppress(StorageError):
        Store(store.url, NO_RETRIES).delete_one(launch.begun_key)


def _drop_ended(store: Store, files: JobFiles, after: int, where: Mapping[str, Any]) -> None:
    """Delete the records of ended launches that began after the same attempt from the same place (island or host).

    A launch has ended if it has given up, or if its process on this machine is gone. Otherwise a command that is
    started again and again would leave ever more records. Records that storage refuses to delete stay.
    """
    with suppress(StorageError):
        for launch_id in files.launched_after(after):
            launch = Launch(files.artifact, launch_id, after=after)
            begun = launch.begun(store)
            if (has_given_up(files, launch_id) or lives(begun) is False) and _site(begun) == _site(where):
                store.delete(launch.prefix)


def lives(begun: Mapping[str, Any]) -> bool | None:
    """True if the process in a launch's record runs on this machine, False if it has ended, None if it ran elsewhere.

    A later process with the same number is mistaken for it.
    """
    pid, processes = begun.get("pid"), _processes()
    if not processes or begun.get("processes") != processes or not isinstance(pid, int) or not 0 < pid < 2**31:
        return None
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)  # other errors: the process is another user's
    return True


def _processes() -> str:
    """Identifier of this boot and container, in which process ids are unique; empty if there is none.

    Containers may share a host's name and use the same process ids.
    """
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _site(fields: Mapping[str, Any]) -> tuple[Any, Any]:
    """The place of a launch, to compare: its island, or its host if it has no island."""
    island = fields.get("island")
    return island, None if island else fields.get("host")


class FailureBudget:
    """Retry policy of a launch: how many failures in a row it survives without a newly saved state.

    Failures are counted on storage, so that two processes add to the same count: the controller that loses workers, and
    the command that loses the controller. A failure that can't be written counts in this process only. `refusal`: why
    storage refused the record that the launch has given up, or None.
    """

    def __init__(self, run_url: str, launch: Launch, max_failures: int):
        self._run_url, self._launch, self._max_failures = run_url, launch, max_failures
        self._unwritten: Counter[tuple[int, int]] = Counter()
        self.refusal: StorageError | None = None

    def spend(self, error: str) -> bool:
        """Record one more failure. If it is one too many, give up and return True.

        A lack of memory doesn't count while the next attempt can take fewer rows at once. Nothing counts while storage
        can't be read: either it comes back, or the workers report it.
        """
        launch = self._launch
        try:
            store = Store(self._run_url)
            files = list_jobs(store, [launch.artifact])[launch.artifact]
            excuse = self._excuse(store, files)
        except StorageError:
            return False
        failures = failures_in_a_row(files, launch.id)
        try:
            if excuse and store.create(excuse, uuid4().hex.encode()):
                return False
            store.create(f"{launch.artifact}/{_failures(launch.id, files.saved)}{uuid4().hex[:12]}", error.encode())
            failures += 1
        except StorageError:
            self._unwritten[files.saved] += 1
        if failures + self._unwritten[files.saved] <= self._max_failures:
            return False
        try:
            launch.give_up(store, GaveUp(error))
        except StorageError as refusal:
            self.refusal = refusal
        return True

    def _excuse(self, store: Store, files: JobFiles) -> str | None:
        """Key of the note that excuses one failure, if the newest attempt ran out of memory and can take fewer rows."""
        if not files.attempts or not files.failed(newest := files.attempts[-1]):
            return None
        failure = Attempt(store, files.artifact, newest).failure()
        if failure is None or failure["kind"] != OUT_OF_MEMORY or failure.get("micro_batch", 1) == 1:
            return None
        return f"{self._launch.prefix}/out-of-memory/{newest:04d}"


def last_loss(store: Store, files: JobFiles) -> str:
    """Why the newest launch last lost workers; empty if it never did, or if the reason can't be read.

    If there were several losses between two saved states, any of them is returned.
    """
    if not files.attempts:
        return ""
    launch_id = str(Attempt(store, files.artifact, files.attempts[-1]).claim().get("launch"))
    keys = [key for key in files.sizes if key.startswith(_all_failures(launch_id))]
    return loss_of(store, files.artifact, max(keys)) if keys else ""


def loss_of(store: Store, artifact: Artifact, key: str) -> str:
    """The text in the record of a lost attempt, as one printable line; empty if it is gone."""
    with suppress(FileNotFoundError, CorruptArtifact):
        return printable(read_some(store, f"{artifact}/{key}", LOSS_BYTES).decode(errors="replace"), LOSS_LETTERS)
    return ""


class LaunchReader:
    """Reads why a launch has ended. It reads each file that a listing shows only once."""

    def __init__(self, store: Store, launch: Launch, before: JobFiles):
        """`before`: the job's files before the launch began. Attempts in it belong to other launches."""
        self._store, self._launch = store, launch
        self._claims: dict[int, dict[str, Any]] = {number: {} for number in before.attempts}
        self._failures: dict[int, dict[str, Any] | None] = {}
        self._losses = set[str]()

    def attempts(self, files: JobFiles) -> list[int]:
        """Numbers of the launch's attempts so far, ascending."""
        for number in files.attempts:
            unread = number not in self._claims and files.claimed(number)
            if unread and (claim := Attempt(self._store, files.artifact, number).claim()):
                self._claims[number] = claim
        return attempts_of(self._launch.id, self._claims)

    def losses(self, files: JobFiles) -> list[str]:
        """Why attempts of the launch were lost since the last call, each as its controller noted it."""
        begins = _all_failures(self._launch.id)
        new = sorted(key for key in files.sizes if key.startswith(begins) and key not in self._losses)
        self._losses.update(new)
        return [loss_of(self._store, files.artifact, key) for key in new]

    def error(self, files: JobFiles) -> DDMError | None:
        """The error that ends this launch: a final failure, or the reason for which it has given up; None otherwise.

        Failures of other launches' attempts don't count.
        """
        artifact = files.artifact
        if has_given_up(files, self._launch.id):
            note = read_failure(self._store, self._launch.given_up_key)
            return _error(artifact, note or {"error": "given up"})  # gone since it was listed
        for number in self.attempts(files)[-2:]:
            if number not in self._failures and files.failed(number):
                self._failures[number] = Attempt(self._store, artifact, number).failure()
            if (failure := self._failures.get(number)) and failure["final"]:
                return _error(artifact, {**failure, "passes": False})
        return None


def _error(artifact: Artifact, fields: Mapping[str, Any]) -> DDMError:
    return TrainingError.from_fields({**fields, "error": f"{artifact}: {fields['error']}"})
