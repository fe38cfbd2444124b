"""The ledger of a run: each process that works for an island leaves an account of what it moved and how long it lived.

Accounts are small objects below `ledger/ISLAND/`, each rewritten by its process alone.
"""

import json
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event, Thread
from typing import Any, Self
from uuid import uuid4

from ddm_ray.errors import CorruptArtifact
from ddm_ray.parsing import parse_object
from ddm_ray.storage.notes import NOTE_BYTES
from ddm_ray.storage.sealed import read_some
from ddm_ray.storage.stops import is_island
from ddm_ray.storage.store import Store
from ddm_ray.storage.store_meter import Counted, meter_of

FOLDER, UNNAMED = "ledger", "unnamed"
WRITE_SECONDS = 300.0
"""Pause between two times that an account is written: what a killed process did since is missing."""
_REQUESTS = 8
KINDS = ("GET", "HEAD", "LIST", "PUT", "POST")


class _Settled:
    """Marks up to where accounts of this process have counted, so that the next one goes on from there."""

    def __init__(self) -> None:
        self.at = time.monotonic() - _age()
        self.counted: dict[str, Counted] = {}


def _age() -> float:
    """Seconds that this process has lived, where the system tells; else 0."""
    try:
        with open("/proc/self/stat") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


_settled = _Settled()
os.register_at_fork(after_in_child=lambda: _settled.__init__())  # type: ignore[misc]


class Account:
    """The account of this process: a context manager, one at a time, which writes it now and then and at its end.

    It counts from where the last one ended, or from the process's start. `workers`: 1 for a process that trains, whose
    life counts as worker-hours, 0 for others. `name` is its key below the island's folder; whoever begins an attempt
    sets it. It never raises: what can't be written is warned of.
    """

    def __init__(self, store: Store, island: str, workers: int, **about: Any):
        self.name, self.about = uuid4().hex, dict(about)
        self._store, self._workers = store, workers
        self._island = island if is_island(island) else UNNAMED
        self._meter, self._closing, self._warned = meter_of(store.url), Event(), False
        self._began, self._before = _settled.at, _settled.counted.get(store.url, Counted())
        self._thread = Thread(target=self._work, name="ledger", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()
        counted, now = self._meter.counted, time.monotonic()
        self._write(counted, now, ended=True)
        _settled.at, _settled.counted[self._store.url] = now, counted

    def _work(self) -> None:
        while not self._closing.wait(WRITE_SECONDS):
            self._write(self._meter.counted, time.monotonic(), ended=False)

    def _write(self, counted: Counted, now: float, ended: bool) -> None:
        mine = counted - self._before
        who = {"host": socket.gethostname(), "pid": os.getpid(), **self.about}
        sums = {"read": mine.read, "written": mine.written, "requests": dict(mine.requests)}
        life = {"seconds": now - self._began, "workers": self._workers, "ended": ended}
        try:
            self._store.write(f"{FOLDER}/{self._island}/{self.name}", json.dumps({**who, **sums, **life}).encode())
        except Exception as error:  # a border: work goes on without it
            if not self._warned:
                print(f"warning: {error}; the ledger lacks this process", file=sys.stderr)
            self._warned = True


@dataclass(frozen=True)
class IslandLedger:
    """Sums over the accounts of an island: processes (of which some may not have ended), worker-hours, traffic."""

    island: str
    processes: int
    open: int
    worker_hours: float
    counted: Counted


def read_ledger(store: Store) -> tuple[list[IslandLedger], int]:
    """The sums by island, and the number of accounts that can't be read. Raises StorageError."""
    keys = list(store.sizes(FOLDER))
    with ThreadPoolExecutor(_REQUESTS) as pool:
        accounts = list(pool.map(lambda key: _read(store, f"{FOLDER}/{key}"), keys))
    by_island: dict[str, list[Mapping[str, Any]]] = {}
    for key, account in zip(keys, accounts, strict=True):
        if account is not None:
            by_island.setdefault(key.partition("/")[0], []).append(account)
    return [_sum(island, members) for island, members in sorted(by_island.items())], accounts.count(None)


def _sum(island: str, accounts: list[Mapping[str, Any]]) -> IslandLedger:
    requests: Counter[str] = Counter()
    for account in accounts:
        requests.update(account["requests"])
    seconds = sum(account["seconds"] * account["workers"] for account in accounts)
    read, written = (sum(account[name] for account in accounts) for name in ("read", "written"))
    sums = Counted(read, written, dict(requests))
    return IslandLedger(island, len(accounts), sum(not each["ended"] for each in accounts), seconds / 3600, sums)


def _read(store: Store, key: str) -> Mapping[str, Any] | None:
    """An account's numbers; None if they can't be read: anybody may have written it."""
    try:
        fields = parse_object(read_some(store, key, NOTE_BYTES))
        numbers = {name: _number(fields[name]) for name in ("read", "written", "workers")}
        requests = {kind: _number(fields["requests"].get(kind, 0)) for kind in KINDS}
        seconds = float(min(max(fields["seconds"], 0.0), 1e12))
        return {**numbers, "requests": requests, "seconds": seconds, "ended": fields["ended"] is True}
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError, CorruptArtifact):
        return None


def _number(given: Any) -> int:
    if not isinstance(given, int) or not 0 <= given < 10**24:
        raise ValueError
    return given
