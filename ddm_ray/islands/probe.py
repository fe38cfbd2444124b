"""An island seen from within: the report that a job of no other purpose gives of it, and how it comes back.

The job is to find under PREFIX on the run's storage what whoever asks has written there just before, and leaves its
report beside it. It prints the report, too: where storage can't be reached, its log says why.
"""

import errno
import math
import os
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ddm_ray.data.loading.cache import cache_root
from ddm_ray.errors import StorageError
from ddm_ray.memory import total_bytes
from ddm_ray.models.hub import out_of_reach
from ddm_ray.spelling import printable
from ddm_ray.storage.patience import Trouble
from ddm_ray.storage.refusals import refusal
from ddm_ray.storage.store import Store
from ddm_ray.storage.versions import versions

PREFIX, NOTE, CLOCK, REPORT = "_check-{}", "note", "clock", "report"
"""Folder of one question in a run, whose id is put in, and the objects in it."""
MARK = "report: "
"""Beginning of the printed line that has the report."""
MOST_REPORT = 500_000
MOST_NODES, MOST_DIGESTS = 100, 10_000

Text = Annotated[str, Field(max_length=1000)]
TroubleKind = Literal["elsewhere", "no key", "away", "refused"]


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, allow_inf_nan=False, extra="ignore")


class Note(_Message):
    """Note of whoever asks: digests of the shards, by which copies of them are known, and the text encoders' names."""

    digests: list[str] = Field(default=[], max_length=MOST_DIGESTS)
    encoders: list[Text] = Field(default=[], max_length=10)


class StorageTrouble(_Message):
    """Refusal of the run's storage, as one of the island's machines met it. `elsewhere`: it sees another storage."""

    kind: TroubleKind
    text: Text


class GPU(_Message):
    """A GPU as torch sees it: its name, and all of its memory in bytes."""

    name: Text
    memory: float


class NodeReport(_Message):
    """One machine. Sizes are in bytes: `memory` is all of it; `room` is free in the cache, copies of the run included.

    `room` is None where nothing is copied, or the cache can't be used, of which `no_room` says why. `ahead`: bounds of
    its clock less that of the machine that asked it, in seconds. `places`: number of workers that it has resources for,
    by what Ray counts. `no_encoder`: why it can't have a text encoder that trainings load.
    """

    name: Text
    versions: dict[Text, Text] = Field(max_length=20)
    memory: float
    gpus: list[GPU] = Field(default=[], max_length=100)
    cache: Text = ""
    room: float | None = None
    no_room: Text = ""
    no_encoder: Text = ""
    trouble: StorageTrouble | None = None
    ahead: tuple[float, float] = (0.0, 0.0)
    places: int = 0


class ClusterReport(_Message):
    """A Ray cluster: all it has of each resource, workers that it has room for, and a look at each machine with room.

    `silent`: machines that gave no report, and why. `grows`: more machines come when they are asked for. `open`: its
    own port answers who gives no token; None where that couldn't be asked.
    """

    resources: dict[Text, float] = Field(default={}, max_length=1000)
    places: int = 0
    nodes: list[NodeReport] = Field(default=[], max_length=MOST_NODES)
    silent: list[Text] = Field(default=[], max_length=MOST_NODES)
    grows: bool = False
    open: bool | None = None


class ProbeReport(_Message):
    """The report of an island. `clock`: its time before and after it created CLOCK, in seconds since 1970 (UTC).

    `creates_once`: storage lets nobody create what exists; None where storage refused before that.
    """

    cluster: ClusterReport
    clock: tuple[float, float]
    trouble: StorageTrouble | None = None
    creates_once: bool | None = None

    def to_json(self) -> str:
        """The report as one line of ASCII."""
        return self.model_dump_json(ensure_ascii=True)

    @classmethod
    def from_json(cls, text: str) -> "ProbeReport | None":
        """Read what `to_json` wrote; None for anything else."""
        try:
            return cls.model_validate_json(text) if len(text) <= MOST_REPORT else None
        except ValidationError:
            return None


def look(run_url: str, check: str, cache: str | None, use_gpu: bool) -> NodeReport:
    """The report of this machine, with what its processes get to see of the note of the question `check`."""
    store = Store(run_url)
    note, trouble = read_note(store, check)
    root, room, no_room = cache_root(cache), None, ""
    if store.local is None:
        try:
            room = _room(root, note.digests if note else [])
        except OSError as error:
            no_room = printable(refusal(error, root), 1000)
    away = next(filter(None, map(out_of_reach, note.encoders if note else [])), "")
    return NodeReport(
        name=printable(socket.gethostname(), 100),
        versions=versions(),
        memory=total_bytes(),
        gpus=_gpus() if use_gpu else [],
        cache=printable(root, 1000),
        room=room,
        no_room=no_room,
        no_encoder=printable(away, 1000),
        trouble=trouble,
    )


def probe(run_url: str, check: str, cluster: ClusterReport, clock: Callable[[], float] = time.time) -> ProbeReport:
    """The report of an island, left on its run's storage if that is the one that the question `check` was put to."""
    store = Store(run_url)
    prefix, creates_once = PREFIX.format(check), None
    before = after = clock()
    _, trouble = read_note(store, check)
    if trouble is None:
        try:
            before = clock()
            store.create(f"{prefix}/{CLOCK}", b"")
            after = clock()
            creates_once = store.creates_once()
        except (StorageError, FileNotFoundError) as error:
            trouble = _trouble(store, error)
    report = ProbeReport(cluster=cluster, clock=(before, after), trouble=trouble, creates_once=creates_once)
    if trouble is None:
        try:
            store.write(f"{prefix}/{REPORT}", report.to_json().encode())
        except (StorageError, FileNotFoundError) as error:
            return report.model_copy(update={"trouble": _trouble(store, error)})
    return report


def read_note(store: Store, check: str) -> tuple[Note | None, StorageTrouble | None]:
    """The note of whoever asks, or why there is none."""
    try:
        data = store.read(f"{PREFIX.format(check)}/{NOTE}", MOST_REPORT)
        return Note.model_validate_json(data), None
    except (StorageError, FileNotFoundError) as error:
        return None, _trouble(store, error)
    except ValidationError:
        return None, StorageTrouble(kind="elsewhere", text=f"{store.url} has another note")


def _trouble(store: Store, error: StorageError | FileNotFoundError) -> StorageTrouble:
    if isinstance(error, FileNotFoundError):
        return StorageTrouble(kind="elsewhere", text=printable(f"{store.url} has nothing of it", 1000))
    text = printable(error, 1000)
    kinds: dict[str, TroubleKind] = {Trouble.KEYLESS.value: "no key", Trouble.DENIED.value: "no key"}
    kinds |= {os.strerror(13): "no key", Trouble.AWAY.value: "away"}
    return StorageTrouble(
        kind=next((kind for words, kind in kinds.items() if f": {words}" in text), "refused"), text=text
    )


def _room(root: Path, digests: Sequence[str]) -> float:
    """Free bytes for copies below a folder, those that are copies of these artifacts counted as free.

    Raises OSError where no copy could be made or read.
    """
    existing = next(folder for folder in (root, *root.absolute().parents) if folder.exists())
    if not existing.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(existing))
    if not os.access(existing, os.R_OK | os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(existing))
    copies = [file for digest in digests for file in (root / digest).glob("*") if file.is_file()]
    return float(shutil.disk_usage(existing).free + sum(file.stat().st_size for file in copies))


def _gpus() -> list[GPU]:
    import torch

    if not torch.cuda.is_available():
        return []
    devices = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return [GPU(name=device.name, memory=float(device.total_memory)) for device in devices]


def places_of(resources: dict[str, float], asked: dict[str, float]) -> int:
    """Number of workers, each of which asks for so much, that a machine with these resources has room for."""
    return math.floor(min(resources.get(name, 0.0) / amount for name, amount in asked.items()) + 1e-6)
