"""Attempts: numbered tries of one training job. The store decides who has a number.

The next attempt goes on from the newest one's states; the first to commit the job counts, whichever it is.
"""

import json
import os
import random
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from uuid import uuid4

from ddm_ray.errors import CorruptArtifact, StorageError, one_line
from ddm_ray.storage.graph import Artifact
from ddm_ray.storage.info import Info, StateInfo, WeightsInfo
from ddm_ray.storage.manifest import NAME, FileRecord, Identity, Manifest
from ddm_ray.storage.store import Store

CLAIM, HEARTBEAT, FAILED = "CLAIM", "HEARTBEAT", "FAILED"
OUT_OF_MEMORY = "OutOfMemory"
MOST_RIVALS, RIVAL_SECONDS = 64, 0.2
"""Numbers that a claim loses to others at most, and the longest pause after each."""
NOTE_BYTES = 2**16
"""Bytes of a claim, heartbeat or failure's note that are read at most."""


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
        """Fields of its claim; empty if they can't be read."""
        with suppress(FileNotFoundError, ValueError, RecursionError):
            claim_fields = json.loads(self.store.read(f"{self.prefix}/{CLAIM}", NOTE_BYTES))
            return claim_fields if isinstance(claim_fields, dict) else {}
        return {}

    def beat(self, progress: dict[str, Any]) -> None:
        """Replace the heartbeat. `progress` has a counter that grows; readers judge change, not clocks."""
        self.store.write(f"{self.prefix}/{HEARTBEAT}", json.dumps(progress).encode())

    def last_beat(self) -> dict[str, Any]:
        """The progress of its last heartbeat; empty before the first. Raises CorruptArtifact if that was altered."""
        key = f"{self.prefix}/{HEARTBEAT}"
        try:
            return {**json.loads(self.store.read(key, NOTE_BYTES)), "attempt": self.number}
        except FileNotFoundError:
            return {}
        except (ValueError, TypeError, RecursionError):
            raise CorruptArtifact(f"{self.store.url}/{key}: not a heartbeat; delete it") from None

    def fail(self, note: dict[str, Any]) -> None:
        """Say why this attempt ended, if nobody has: `error`, its `kind`, and if trying again is in vain (`final`)."""
        self.store.create(f"{self.prefix}/{FAILED}", json.dumps(note).encode())

    def failure(self) -> dict[str, Any] | None:
        """Why it ended: what `fail` was told. None if it said nothing."""
        return read_failure(self.store, f"{self.prefix}/{FAILED}")

    def state_prefix(self, step: int) -> str:
        """Key prefix of the training state after `step` steps."""
        return f"{self.prefix}/state/step-{step:09d}"

    def commit_state(self, step: int, identity: Identity, records: dict[str, FileRecord], info: StateInfo) -> None:
        """Commit a training state whose files are written, by its manifest."""
        self._commit(self.state_prefix(step), identity, records, info)

    def drop_states(self, keep: int) -> list[CorruptArtifact]:
        """Delete all but the newest `keep` sound states of this attempt and of those before it, which it has overtaken.

        Damaged ones don't count, and newer ones than all `keep` stay, as many. Before anything goes, the newest of them
        is read back from a local disk; an object store is asked for sizes alone, as it checks what it takes, and
        tens of GB would come back by the network each time. Returns the damage that reading back met.
        """
        damages, kept = list[CorruptArtifact](), list[str]()
        for state in saved_states(self.store, self.job):
            if isinstance(state, CorruptArtifact) or int(state.prefix.split("/")[-3]) > self.number:
                continue
            if not kept and (damage := _damage(self.store, state)):
                damages.append(damage)
                continue
            kept.append(state.prefix)
            if len(kept) == keep:
                break
        passed = committed = damaged = 0
        for number in [number for number in reversed(claimed(self.store, self.job)) if number <= self.number]:
            base = f"{Attempt(self.store, self.job, number).prefix}/state"
            for name in reversed(self.store.folders(base)):
                if f"{base}/{name}" in kept:
                    passed, committed = passed + 1, committed + 1
                    continue
                if self.store.exists(f"{base}/{name}/{NAME}"):
                    committed, damaged = committed + 1, damaged + 1
                    if passed < keep and damaged <= keep:
                        continue
                elif committed == 0 and number == self.number:
                    continue  # being written
                self.store.delete_one(f"{base}/{name}/{NAME}")  # first: without it the rest isn't a state
                self.store.delete(f"{base}/{name}")
        return damages

    def weights_prefix(self, step: int) -> str:
        """Key prefix of the EMA weights after `step` steps."""
        return f"{self.prefix}/weights/step-{step:09d}"

    def commit_weights(
        self, step: int, identity: Identity, records: dict[str, FileRecord], info: WeightsInfo
    ) -> Manifest:
        """Commit EMA weights whose files are written, by their manifest."""
        return self._commit(self.weights_prefix(step), identity, records, info)

    def drop_weights(self, keep: int) -> None:
        """Delete the weights that this attempt and those before it have published, but for the `keep` furthest steps.

        All attempts' weights of one step stay, or go, together: the job's manifest names the last step's of one.
        """
        numbers = [number for number in claimed(self.store, self.job) if number <= self.number]
        bases = [f"{Attempt(self.store, self.job, number).prefix}/weights" for number in numbers]
        folders = [(name, f"{base}/{name}") for base in bases for name in self.store.folders(base)]
        dropped = sorted({name for name, _ in folders})[:-keep]
        for name, prefix in folders:
            if name in dropped:
                self.store.delete_one(f"{prefix}/{NAME}")  # first, as of a state
                self.store.delete(prefix)

    def _commit(self, prefix: str, identity: Identity, records: dict[str, FileRecord], info: Info) -> Manifest:
        manifest = Manifest(prefix, identity, records, info.as_json())
        self.store.write(f"{prefix}/{NAME}", manifest.to_json())
        return manifest


def read_failure(store: Store, key: str) -> dict[str, Any] | None:
    """The note of a failure, as far as it can be read: another version may have written it. None if there is none."""
    try:
        note = json.loads(store.read(key, NOTE_BYTES))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError):
        note = {}  # that it failed is known even if the reason can't be read
    known = note if isinstance(note, dict) else {}
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
    """Claim the next free attempt number of a job, against its rivals; `about` is kept with the claim.

    Raises StorageError if MOST_RIVALS numbers in a row are taken that storage didn't list.
    """
    fields = {**about, "host": socket.gethostname(), "pid": os.getpid(), "id": uuid4().hex}
    first = max(claimed(store, job), default=0) + 1
    for number in range(first, first + MOST_RIVALS):
        if store.create(f"{job}/attempts/{number:04d}/{CLAIM}", json.dumps(fields).encode()):
            return Attempt(store, job, number)
        time.sleep(random.uniform(0, RIVAL_SECONDS))
    last = f"{store.url}/{job}/attempts/{first:04d} to {first + MOST_RIVALS - 1:04d}"
    raise StorageError(f"{last}: storage answers that all these exist, and listed none of them; ask its provider")


def claimed(store: Store, job: str) -> list[int]:
    """Numbers of a job's attempts, ascending."""
    return sorted(int(name) for name in store.folders(f"{job}/attempts") if name.isdecimal())


def heartbeat(store: Store, job: str) -> dict[str, Any] | None:
    """Progress last told by the newest attempt that told any, with its `attempt` number; None if none did.

    Raises CorruptArtifact if that heartbeat was altered.
    """
    for number in reversed(claimed(store, job)):
        if beat := Attempt(store, job, number).last_beat():
            return beat
    return None


def _damage(store: Store, state: SavedState) -> CorruptArtifact | None:
    """The error of a state whose bytes a local disk doesn't give back as they were written."""
    for name, record in state.manifest.files.items() if store.local else ():
        key = f"{state.prefix}/{name}"
        try:
            if store.read_back(key) != record.sha256:
                return CorruptArtifact(f"{store.url}/{key}: the disk has other bytes than were written")
        except CorruptArtifact as error:
            return error
    return None


def saved_states(store: Store, job: str) -> Iterator[SavedState | CorruptArtifact]:
    """A job's training states, best first: highest attempt, then highest step. A damaged one as its error.

    Sizes are compared with the manifest's; checksums are whose who reads the files.
    """
    for number in reversed(claimed(store, job)):
        base = f"{job}/attempts/{number:04d}/state"
        for name in reversed(store.folders(base)):
            prefix = f"{base}/{name}"
            try:
                manifest = Manifest.from_json(store.read(f"{prefix}/{NAME}"), f"{store.url}/{prefix}/{NAME}")
            except FileNotFoundError:
                continue  # without a manifest: never finished, or being dropped
            except CorruptArtifact as error:
                yield error
                continue
            sizes = store.sizes(prefix)
            wrong = [file for file, record in manifest.files.items() if sizes.get(file) != record.bytes]
            if wrong:
                yield CorruptArtifact(
                    f"{store.url}/{prefix}/{wrong[0]}: gone or cut short, its manifest says otherwise"
                )
            else:
                yield SavedState(int(name.removeprefix("step-")), prefix, manifest)
