"""The heartbeat of an island's worker: a note on storage with what it does, and how other workers read it.

Other workers judge by its counter and their own clocks whether a worker lives, as with training jobs.
"""

import json
import os
import re
import socket
import sys
from collections.abc import Container
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Event, Lock, Thread
from typing import Annotated, Any, Self

from pydantic import AfterValidator, ConfigDict

from ddm_ray.errors import CorruptArtifact, DDMError, StorageError
from ddm_ray.jobs.attempts import claim_number
from ddm_ray.jobs.notes import Number, StoredNote, read_note
from ddm_ray.jobs.stops import is_island, island_prefix
from ddm_ray.run.info import Count
from ddm_ray.spelling import printable
from ddm_ray.store.store import Store

LEASE_SECONDS, MAX_LEASE_SECONDS = 60.0, 600.0
"""Default and longest lease of a worker. If a worker is silent for longer, others take its job.

A worker beats six times per lease.
"""
HEARTBEAT = "PRESENCE"
"""Name of the heartbeat's file, which older versions read, too."""
_NUMBER = re.compile(r"[0-9]{1,9}")
_REQUESTS = 8


Shown = Annotated[str, AfterValidator(lambda text: printable(text, 200))]
Lease = Annotated[Number, AfterValidator(lambda given: min(MAX_LEASE_SECONDS, given) if given > 0 else LEASE_SECONDS)]
Speed = Annotated[Number | None, AfterValidator(lambda given: given if given and given > 0 else None)]


class WorkerState(StoredNote):
    """A worker's heartbeat: a note on storage. `id` is ISLAND/NUMBER, and `beat` is a counter that grows.

    A worker that is silent for more than `lease_seconds` may be dead. `holds`: the artifact that it trains, or "".
    `waits`: words on what it waits for. `speed`: FLOP/s of its last training job other than a router, or None. `ended`:
    it has noted its end.
    """

    called = "note of a worker"
    model_config = ConfigDict(frozen=True)
    id: str = ""
    beat: Count | None = None
    lease_seconds: Lease = LEASE_SECONDS
    holds: Shown = ""
    waits: Shown = ""
    speed: Speed = None
    ended: bool = False
    host: Shown = ""
    job: Shown = ""

    @property
    def island(self) -> str:
        """Name of the worker's island."""
        return self.id.rpartition("/")[0]

    @property
    def number(self) -> int:
        """Number among the workers that the island has had."""
        return int(self.id.rpartition("/")[2])

    @classmethod
    def read(cls, store: Store, worker_id: str) -> Self:
        """The readable fields of the heartbeat of the worker with this id; another version may have written it.

        Raises ValueError or ConfigError for an invalid id.
        """
        fields: dict[str, Any] = {}
        with suppress(CorruptArtifact):
            fields = read_note(store, f"{_prefix(worker_id)}/{HEARTBEAT}", cls) or {}
        return cls(**{**fields, "id": worker_id})


def read_workers(store: Store, known: Container[str] = ()) -> list[WorkerState]:
    """The heartbeats of all islands' workers, except for those with `known` ids.

    This takes a listing, and a GET per worker.
    """
    ids = []
    for key in store.sizes("islands"):
        island, _, rest = key.partition("/workers/")
        number, _, name = rest.partition("/")
        worker_id = f"{island}/{number}"
        if name == HEARTBEAT and _NUMBER.fullmatch(number) and is_island(island) and worker_id not in known:
            ids.append(worker_id)
    with ThreadPoolExecutor(_REQUESTS) as pool:
        return list(pool.map(lambda worker_id: WorkerState.read(store, worker_id), sorted(ids)))


def last_speed(store: Store, island: str) -> float | None:
    """FLOP/s of the island's newest worker that noted a speed; None if none did."""
    mine = [each for each in read_workers(store) if each.island == island]
    return next((each.speed for each in sorted(mine, key=_number, reverse=True) if each.speed), None)


def _number(worker: WorkerState) -> int:
    return worker.number


def forget(store: Store, dead: WorkerState) -> None:
    """Delete the heartbeat of a dead worker. Otherwise each look would read those of all past workers.

    If storage refuses, it stays.
    """
    with suppress(StorageError):
        store.delete_one(f"{_prefix(dead.id)}/{HEARTBEAT}")


def _prefix(worker_id: str) -> str:
    island, _, number = worker_id.rpartition("/")
    if not _NUMBER.fullmatch(number):
        raise ValueError(f"{worker_id!r:.80} is no worker")
    return f"{island_prefix(island)}/workers/{number}"


class WorkerHeartbeat:
    """Writes one worker's heartbeat six times per lease, and at once when a field changes.

    A context manager; when it ends, the note says that the worker has ended. A failed write is repeated.
    """

    def __init__(self, store: Store, island: str, lease_seconds: float = LEASE_SECONDS, **fields: Any):
        """Claim the next number of the island. `fields` go into the note. Raises StorageError and ConfigError."""
        process = {"host": socket.gethostname(), "pid": os.getpid()}
        self._store, self._fields = store, {"lease_seconds": lease_seconds, "island": island, **process, **fields}
        self.id = f"{island}/{claim_number(store, f'{island_prefix(island)}/workers', process):04d}"
        self._beats, self._lock, self._closing = 0, Lock(), Event()
        self._thread = Thread(target=self._work, name="heartbeat", daemon=True)

    def __enter__(self) -> Self:
        self._write()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()
        with suppress(DDMError):
            self.update(ended=True, holds="", waits="")

    @property
    def state(self) -> WorkerState:
        """The current state, as others read it."""
        with self._lock:
            return WorkerState(**{**self._fields, "beat": self._beats, "id": self.id})

    def update(self, **fields: Any) -> None:
        """Change fields of the note and write it before returning. Raises StorageError."""
        with self._lock:
            if fields.items() <= self._fields.items():
                return
            self._fields |= fields
        self._write()

    def _write(self) -> None:
        with self._lock:
            self._beats += 1
            note = {**self._fields, "beat": self._beats}
            self._store.write(f"{_prefix(self.id)}/{HEARTBEAT}", json.dumps(note).encode())

    def _work(self) -> None:
        warned = False
        while not self._closing.wait(self._fields["lease_seconds"] / 6):
            try:
                self._write()
                warned = False
            except (DDMError, OSError) as error:
                if not warned:
                    print(f"warning: {error}; others may take this island for dead", file=sys.stderr)
                warned = True
