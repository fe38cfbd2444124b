"""Attempts: numbered tries of one training job. Storage gives each number to one process only.

The next attempt continues from the newest state of the newest attempt. The first attempt that commits the job counts.
"""

import json
import os
import random
import re
import socket
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from uuid import uuid4

from ddm_ray.errors import CorruptArtifact, StorageError
from ddm_ray.jobs.notes import Beat, Claim, Failure, read_note
from ddm_ray.run.graph import Artifact
from ddm_ray.run.info import Info, StateInfo, WeightsInfo
from ddm_ray.run.manifest import NAME, FileRecord, Identity, Manifest, read_manifest
from ddm_ray.spelling import one_line
from ddm_ray.store.store import Store

CLAIM, HEARTBEAT, FAILED = "CLAIM", "HEARTBEAT", "FAILED"
OUT_OF_MEMORY = "OutOfMemory"
STATE, WEIGHTS = "state", "weights"
"""Folders of an attempt's training states and of its published weights."""
PICTURE, PICTURES = "grid.png", "pictures"
"""Name of the picture beside published weights, and folder of an attempt's pictures of states."""
CURVE = "curve.safetensors"
"""Name of the file of each step's loss in a state, and beside published weights, where only charts need it."""
Folders = dict[tuple[int, str], dict[str, int]]
"""Sizes of the files in each folder of one kind, by the attempt's number and the folder's name."""
MAX_ATTEMPTS = 10**9
_ATTEMPT, _STEP = re.compile(r"[0-9]{4,9}"), re.compile(r"step-([0-9]{9,15})")
MAX_RIVALS, RIVAL_SECONDS = 64, 0.2
"""Count of numbers that a claim may lose to rivals, and the longest pause after each."""


def attempt_number(name: str) -> int | None:
    """The number of the attempt with a folder of this name; None for other names."""
    return int(name) if _ATTEMPT.fullmatch(name) and name == f"{int(name):04d}" else None


def step_of(name: str) -> int | None:
    """The step of the state or weights in a folder of this name; None for other names."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match and name == f"step-{int(match[1]):09d}" else None


@dataclass(frozen=True)
class SavedState:
    """A committed training state: `step` finished steps, its manifest, and where its files are."""

    step: int
    prefix: str
    manifest: Manifest


@dataclass(frozen=True)
class Attempt:
    """One try of the training job at `job` (e.g. experts/003). It writes only below its own prefix."""

    store: Store
    job: str
    number: int

    @property
    def prefix(self) -> str:
        """Key prefix of all that this attempt writes."""
        return f"{self.job}/attempts/{self.number:04d}"

    def claim(self) -> dict[str, Any]:
        """Fields of the attempt's claim; empty if they can't be read."""
        with suppress(CorruptArtifact):
            return read_note(self.store, f"{self.prefix}/{CLAIM}", Claim) or {}
        return {}

    def beat(self, progress: dict[str, Any]) -> None:
        """Replace the heartbeat. `progress` has a counter that grows; observers look for changes, not at clocks."""
        self.store.write(f"{self.prefix}/{HEARTBEAT}", json.dumps(progress).encode())

    def last_beat(self) -> dict[str, Any]:
        """The progress in the last heartbeat; empty before the first, and if it can't be read."""
        with suppress(CorruptArtifact):
            if fields := read_note(self.store, f"{self.prefix}/{HEARTBEAT}", Beat):
                return {**fields, "attempt": self.number}
        return {}

    def fail(self, note: dict[str, Any]) -> None:
        """Note why this attempt ended, unless that is noted: `error`, its `kind`, and if it is `final` (no retry)."""
        self.store.create(f"{self.prefix}/{FAILED}", json.dumps(note).encode())

    def failure(self) -> dict[str, Any] | None:
        """The note of `fail`; None if there is none."""
        return read_failure(self.store, f"{self.prefix}/{FAILED}")

    def state_prefix(self, step: int) -> str:
        """Key prefix of the training state after `step` steps."""
        return f"{self.prefix}/{STATE}/step-{step:09d}"

    def picture_key(self, step: int) -> str:
        """Key of the picture of the state after `step` steps."""
        return f"{self.prefix}/{PICTURES}/step-{step:09d}.png"

    def commit_state(self, step: int, identity: Identity, records: dict[str, FileRecord], info: StateInfo) -> None:
        """Commit a training state by its manifest, after its files are written."""
        self._commit(self.state_prefix(step), identity, records, info)

    def drop_states(self, keep: int) -> list[CorruptArtifact]:
        """Delete all but the newest `keep` sound states of this attempt and of those before it, which it has overtaken.

        Damaged states don't count; up to `keep` of them stay if they are newer than all kept ones. Before anything is
        deleted, the newest state is read back from a local disk. In an object store only sizes are compared, since it
        checks uploads itself, and tens of GB would pass the network each time. Returns the damage that was found.
        """
        damages, kept, folders = list[CorruptArtifact](), list[str](), folders_of(self.store, self.job, STATE)
        for state in _saved(self.store, self.job, folders):
            if isinstance(state, CorruptArtifact) or int(state.prefix.split("/")[-3]) > self.number:
                continue
            if not kept and (damage := _damage(self.store, state)):
                damages.append(damage)
                continue
            kept.append(state.prefix)
            if len(kept) == keep:
                break
        passed = committed = damaged = 0
        for (number, name), sizes in sorted(folders.items(), reverse=True):
            prefix = f"{Attempt(self.store, self.job, number).prefix}/{STATE}/{name}"
            if number > self.number:
                continue
            if prefix in kept:
                passed, committed = passed + 1, committed + 1
                continue
            if NAME in sizes:
                committed, damaged = committed + 1, damaged + 1
                if passed < keep and damaged <= keep:
                    continue
            elif committed == 0 and number == self.number:
                continue  # being written
            self.store.delete_one(f"{prefix}/{NAME}")  # first, since it makes the rest a state
            self.store.delete(prefix)
        return damages

    def weights_prefix(self, step: int) -> str:
        """Key prefix of the EMA weights after `step` steps."""
        return f"{self.prefix}/{WEIGHTS}/step-{step:09d}"

    def commit_weights(
        self, step: int, identity: Identity, records: dict[str, FileRecord], info: WeightsInfo
    ) -> Manifest:
        """Commit EMA weights by their manifest, after their files are written."""
        return self._commit(self.weights_prefix(step), identity, records, info)

    def drop_weights(self, keep: int) -> None:
        """Delete published weights of this attempt and those before it, except for the `keep` highest steps.

        The weights of one step stay or go together in all attempts, since the job's manifest names one attempt's.
        """
        folders = [
            (name, f"{Attempt(self.store, self.job, number).prefix}/{WEIGHTS}/{name}")
            for number, name in folders_of(self.store, self.job, WEIGHTS)
            if number <= self.number
        ]
        dropped = sorted({name for name, _ in folders})[:-keep]
        for name, prefix in folders:
            if name in dropped:
                self.store.delete_one(f"{prefix}/{NAME}")  # first, as with a state
                self.store.delete(prefix)

    def _commit(self, prefix: str, identity: Identity, records: dict[str, FileRecord], info: Info) -> Manifest:
        manifest, key = Manifest(prefix, identity, records, info.as_json()), f"{prefix}/{NAME}"
        self.store.write(key, manifest.to_write(f"{self.store.url}/{key}"))
        return manifest


def read_failure(store: Store, key: str) -> dict[str, Any] | None:
    """The readable fields of a failure's note, which another version may have written. None if there is no note."""
    try:
        known = read_note(store, key, Failure)
    except CorruptArtifact:
        known = {}  # the attempt has failed, even if the reason can't be read
    if known is None:
        return None
    fix = known.get("fix")
    if isinstance(fix, dict) and "artifact" in fix and not _is_artifact(fix["artifact"]):
        known["fix"] = None
    error = one_line(known.get("error") or "for a reason that can't be read")
    return {**known, "error": error, "kind": known.get("kind", ""), "final": known.get("final") is True}


def _is_artifact(path: Any) -> bool:
    with suppress(ValueError):
        return isinstance(path, str) and bool(Artifact(path))
    return False


def claim(store: Store, job: str, about: Mapping[str, Any] = MappingProxyType({})) -> Attempt:
    """Claim the next free attempt number of a job. `about` is stored with the claim.

    Raises StorageError as `claim_number` does.
    """
    fields = {**about, "host": socket.gethostname(), "pid": os.getpid(), "id": uuid4().hex}
    return Attempt(store, job, claim_number(store, f"{job}/attempts", fields))


def claim_number(store: Store, folder: str, fields: Mapping[str, Any]) -> int:
    """Claim the next free number of a folder by a file with these fields, which storage creates for one process only.

    Raises StorageError if MAX_RIVALS numbers in a row exist that storage didn't list.
    """
    first = max(_numbers(store, folder), default=0) + 1
    if first + MAX_RIVALS > MAX_ATTEMPTS:
        raise StorageError(f"{store.url}/{folder}/{first - 1:04d}: no number is left after it; delete it", passes=False)
    for number in range(first, first + MAX_RIVALS):
        if store.create(f"{folder}/{number:04d}/{CLAIM}", json.dumps(fields).encode()):
            return number
        time.sleep(random.uniform(0, RIVAL_SECONDS))
    last = f"{store.url}/{folder}/{first:04d} to {first + MAX_RIVALS - 1:04d}"
    raise StorageError(f"{last}: storage answers that all these exist, and listed none of them; ask its provider")


def claimed(store: Store, job: str) -> list[int]:
    """Numbers of a job's attempts, ascending."""
    return _numbers(store, f"{job}/attempts")


def _numbers(store: Store, folder: str) -> list[int]:
    numbers = map(attempt_number, store.folders(folder))
    return sorted(number for number in numbers if number is not None)


def heartbeat(store: Store, job: str) -> dict[str, Any] | None:
    """The last heartbeat of the newest attempt that has one, with the `attempt` number; None if none has."""
    for number in reversed(claimed(store, job)):
        if beat := Attempt(store, job, number).last_beat():
            return beat
    return None


def _damage(store: Store, state: SavedState) -> CorruptArtifact | None:
    """The damage of a state on a local disk, as an error; None if all bytes are as they were written."""
    for name, record in state.manifest.files.items() if store.local else ():
        key = f"{state.prefix}/{name}"
        try:
            if store.read_back(key) != record.sha256:
                return CorruptArtifact(f"{store.url}/{key}: the disk has other bytes than were written")
        except CorruptArtifact as error:
            return error
    return None


def saved_states(store: Store, job: str) -> Iterator[SavedState | CorruptArtifact]:
    """A job's training states, best first: highest attempt, then highest step.

    A damaged state gives its error. So does a folder without a state's name, such as a copy that a person made. Sizes
    are compared with the manifest here; checksums are compared when the files are read. There is one listing for all.
    """
    yield from _saved(store, job, folders_of(store, job, STATE, unnamed=False))


def _saved(store: Store, job: str, folders: Folders) -> Iterator[SavedState | CorruptArtifact]:
    for (number, name), sizes in sorted(folders.items(), key=_by_step, reverse=True):
        prefix, step = f"{Attempt(store, job, number).prefix}/{STATE}/{name}", step_of(name)
        if NAME not in sizes:
            continue  # unfinished, or being deleted
        if step is None:
            yield CorruptArtifact(f"{store.url}/{prefix}: isn't called as a state is, so it isn't taken for one")
            continue
        try:
            manifest = read_manifest(store, prefix)
        except FileNotFoundError:
            continue  # deleted meanwhile
        except CorruptArtifact as error:
            yield error
            continue
        wrong = [file for file, record in manifest.files.items() if sizes.get(file) != record.bytes]
        if wrong:
            yield CorruptArtifact(f"{store.url}/{prefix}/{wrong[0]}: gone or cut short, its manifest says otherwise")
        else:
            yield SavedState(step, prefix, manifest)


def _by_step(state: tuple[tuple[int, str], Mapping[str, int]]) -> tuple[int, int, str]:
    (number, name), _ = state
    return number, step_of(name) or 0, name


def folders_of(store: Store, job: str, kind: str, unnamed: bool = True) -> Folders:
    """All folders of states or of weights of a job's attempts, from a single listing.

    `unnamed`: on a local disk, include folders with unfinished files only. A killed writer may have left GBs there.
    """
    folders: Folders = defaultdict(dict)
    numbers = set[int]()
    for key, size in store.sizes(f"{job}/attempts").items():
        attempt, _, rest = key.partition("/")
        number = attempt_number(attempt)
        if number is None:
            continue
        if key == attempt and store.is_folder(f"{job}/attempts/{key}"):  # it may hold the best states
            raise StorageError(
                f"{store.url}/{job}/attempts/{key}: can't be listed; let this user read it", passes=False
            )
        numbers.add(number)
        own, _, below = rest.partition("/")
        name, _, file = below.partition("/")
        if own == kind and file:
            folders[number, name][file] = size
    for number in numbers if unnamed and store.local is not None else ():
        for name in store.folders(f"{Attempt(store, job, number).prefix}/{kind}"):
            folders.setdefault((number, name), {})
    return folders
