"""Attempts: numbered tries of one training job. The store decides who has a number; the newest counts."""

import json
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ddm_ray.errors import CorruptArtifact
from ddm_ray.storage.manifest import NAME, FileRecord, Identity, Manifest, verify
from ddm_ray.storage.store import Store

KEEP_STATES = 2


@dataclass(frozen=True)
class SavedState:
    """A verified training state: `step` finished steps, its manifest, and where its files are."""

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

    def beat(self, progress: dict[str, Any]) -> None:
        """Replace the heartbeat. `progress` has a counter that grows; readers judge change, not clocks."""
        self.store.write(f"{self.prefix}/HEARTBEAT", json.dumps(progress).encode())

    def save_state(self, step: int, identity: Identity, files: dict[str, bytes], info: dict[str, Any]) -> None:
        """Commit a training state after `step` steps, manifest last; keep the newest KEEP_STATES alone."""
        self._commit(f"{self.prefix}/state/step-{step:09d}", identity, files, info)
        for name in self.store.folders(f"{self.prefix}/state")[:-KEEP_STATES]:
            self.store.delete(f"{self.prefix}/state/{name}")

    def publish_weights(
        self, step: int, identity: Identity, files: dict[str, bytes], info: dict[str, Any]
    ) -> tuple[str, Manifest]:
        """Commit EMA weights after `step` steps; returns their prefix relative to the job, and manifest."""
        prefix = f"{self.prefix}/weights/step-{step:09d}"
        return prefix.removeprefix(f"{self.job}/"), self._commit(prefix, identity, files, info)

    def _commit(self, prefix: str, identity: Identity, files: dict[str, bytes], info: dict[str, Any]) -> Manifest:
        for name, data in files.items():
            self.store.write(f"{prefix}/{name}", data)
        records = {name: FileRecord.of(data) for name, data in files.items()}
        manifest = Manifest(prefix, identity, records, info)
        self.store.write(f"{prefix}/{NAME}", manifest.to_json())
        return manifest


def claim(store: Store, job: str) -> Attempt:
    """Claim the next free attempt number of a job, against any number of rivals."""
    number = max(claimed(store, job), default=0) + 1
    owner = json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode()
    while not store.create(f"{job}/attempts/{number:04d}/CLAIM", owner):
        number += 1
    return Attempt(store, job, number)


def claimed(store: Store, job: str) -> list[int]:
    """Numbers of a job's attempts, ascending."""
    return sorted(int(name) for name in store.folders(f"{job}/attempts") if name.isdecimal())


def heartbeat(store: Store, job: str) -> dict[str, Any] | None:
    """Progress last told by the newest attempt that told any, with its `attempt` number; None if none did.

    Raises CorruptArtifact if that heartbeat was altered.
    """
    for number in reversed(claimed(store, job)):
        key = f"{job}/attempts/{number:04d}/HEARTBEAT"
        try:
            return {**json.loads(store.read(key)), "attempt": number}
        except FileNotFoundError:
            continue
        except (ValueError, TypeError):
            raise CorruptArtifact(f"{store.url}/{key}: not a heartbeat; delete it") from None
    return None


def saved_states(store: Store, job: str) -> Iterator[SavedState | CorruptArtifact]:
    """A job's training states, best first: highest attempt, then highest step. A damaged one as its error.

    All files are read once to verify their checksums, so a yielded state is whole.
    """
    for number in reversed(claimed(store, job)):
        base = f"{job}/attempts/{number:04d}/state"
        for name in reversed(store.folders(base)):
            prefix = f"{base}/{name}"
            try:
                manifest = Manifest.from_json(store.read(f"{prefix}/{NAME}"), f"{store.url}/{prefix}/{NAME}")
                for file, record in manifest.files.items():
                    verify(store.read(f"{prefix}/{file}"), record, f"{store.url}/{prefix}/{file}")
            except FileNotFoundError:
                continue  # without a manifest or with a file gone: never finished, or being dropped
            except CorruptArtifact as error:
                yield error
                continue
            yield SavedState(int(name.removeprefix("step-")), prefix, manifest)
