"""WorkerState: a note that a worker of an island keeps on storage of what it does, and how others read it.

Who lives is judged by counters that move and by the observer's own clock, as with training jobs.
"""

import json
import os
import re
import socket
import sys
from collections.abc import Container, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from threading import Event, Lock, Thread
from typing import Any, Self

from ddm_ray.errors import CorruptArtifact, DDMError, StorageError
from ddm_ray.jobs.attempts import claim_number
from ddm_ray.jobs.notes import WorkerNote, read_note
from ddm_ray.jobs.stops import is_island, island_prefix
from ddm_ray.spelling import printable
from ddm_ray.store.store import Store

LEASE_SECONDS, MAX_LEASE_SECONDS = 60.0, 600.0
"""Silence from which a worker may be dead, so that others take its job, and the longest that it may announce.

It beats each sixth of it.
"""
PRESENCE = "PRESENCE"
_NUMBER = re.compile(r"[0-9]{1,9}")
_REQUESTS = 8


@dataclass(frozen=True)
class WorkerState:
    """A worker's note, as it was read: `id` is ISLAND/NUMBER, `beat` a counter that grows, silence longer than
    `lease_seconds` means that it may be dead.

    `holds` is the artifact that it trains, "" none; `waits` words on what it waits for; `speed` FLOP/s of its last
    training but of a router, None before any. It has `ended` where it said so itself.
    """

    id: str
    beat: int | None = None
    lease_seconds: float = LEASE_SECONDS
    holds: str = ""
    waits: str = ""
    speed: float | None = None
    ended: bool = False
    host: str = ""
    job: str = ""

    @property
    def island(self) -> str:
        """Name of its island."""
        return self.id.rpartition("/")[0]

    @property
    def number(self) -> int:
        """Number among the workers that its island has had."""
        return int(self.id.rpartition("/")[2])

    @classmethod
    def read(cls, store: Store, worker_id: str) -> Self:
        """The note of the worker of this id, as far as it can be read: others wrote it, maybe of another version.

        Raises ValueError or ConfigError for what is no id.
        """
        key = f"{_prefix(worker_id)}/{PRESENCE}"
        with suppress(CorruptArtifact):
            return cls.parse(worker_id, read_note(store, key, WorkerNote) or {})
        return cls(worker_id)

    @classmethod
    def parse(cls, worker_id: str, fields: Mapping[str, Any]) -> Self:
        """The note with these fields."""
        lease, speed = fields.get("lease_seconds"), fields.get("speed")
        words = {name: printable(fields.get(name, ""), 200) for name in ("holds", "waits", "host", "job")}
        return cls(
            worker_id,
            fields.get("beat"),
            min(MAX_LEASE_SECONDS, lease) if lease and lease > 0 else LEASE_SECONDS,
            speed=speed if speed and speed > 0 else None,
            ended=fields.get("ended", False),
            **words,
        )


def workers(store: Store, known: Container[str] = ()) -> list[WorkerState]:
    """The notes of all workers that any island has on storage, but for those `known` by their ids.

    That is a listing, and a GET each.
    """
    ids = []
    for key in store.sizes("islands"):
        island, _, rest = key.partition("/workers/")
        number, _, name = rest.partition("/")
        worker_id = f"{island}/{number}"
        if name == PRESENCE and _NUMBER.fullmatch(number) and is_island(island) and worker_id not in known:
            ids.append(worker_id)
    with ThreadPoolExecutor(_REQUESTS) as pool:
        return list(pool.map(lambda worker_id: WorkerState.read(store, worker_id), sorted(ids)))


def last_speed(store: Store, island: str) -> float | None:
    """FLOP/s that the island's newest worker with one has left; None: none."""
    mine = [each for each in workers(store) if each.island == island]
    return next((each.speed for each in sorted(mine, key=_number, reverse=True) if each.speed), None)


def _number(presence: WorkerState) -> int:
    return presence.number


def forget(store: Store, dead: WorkerState) -> None:
    """Delete the note of a worker that lives no more: else each look would read those of all that ever were.

    What storage won't delete stays.
    """
    with suppress(StorageError):
        store.delete_one(f"{_prefix(dead.id)}/{PRESENCE}")


def _prefix(worker_id: str) -> str:
    island, _, number = worker_id.rpartition("/")
    if not _NUMBER.fullmatch(number):
        raise ValueError(f"{worker_id!r:.80} is no worker")
    return f"{island_prefix(island)}/workers/{number}"


class WorkerHeartbeat:
    """Keeps one worker's presence: rewrites it six times a lease, and at once when told something new.

    A context manager; its end says that the worker has ended. A note that can't be written is written again.
    """

    def __init__(self, store: Store, island: str, lease_seconds: float = LEASE_SECONDS, **fields: Any):
        """Claim the next number of the island; `fields` go into the note. Raises StorageError and ConfigError."""
        who = {"host": socket.gethostname(), "pid": os.getpid()}
        self._store, self._fields = store, {"lease_seconds": lease_seconds, "island": island, **who, **fields}
        self.id = f"{island}/{claim_number(store, f'{island_prefix(island)}/workers', who):04d}"
        self._beats, self._lock, self._closing = 0, Lock(), Event()
        self._thread = Thread(target=self._work, name="presence", daemon=True)

    def __enter__(self) -> Self:
        self._write()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()
        with suppress(DDMError):
            self.tell(ended=True, holds="", waits="")

    @property
    def presence(self) -> WorkerState:
        """The note as it is."""
        with self._lock:
            return WorkerState.parse(self.id, {**self._fields, "beat": self._beats})

    def tell(self, **fields: Any) -> None:
        """Change fields of the note, and write it before returning. Raises StorageError."""
        with self._lock:
            if fields.items() <= self._fields.items():
                return
            self._fields |= fields
        self._write()

    def _write(self) -> None:
        with self._lock:
            self._beats += 1
            note = {**self._fields, "beat": self._beats}
            self._store.write(f"{_prefix(self.id)}/{PRESENCE}", json.dumps(note).encode())

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
