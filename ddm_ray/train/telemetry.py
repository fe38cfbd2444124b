"""Curves of a training attempt as TensorBoard's event files. Whatever storage does, training isn't held up."""

import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.summary_pb2 import Summary

from ddm_ray.data.scratch import scratch_folder
from ddm_ray.errors import StorageError
from ddm_ray.storage.store import Store

FOLDER = "tensorboard"
FLUSH_SECONDS = 1.0
UPLOAD_SECONDS = 30.0
CLOSE_SECONDS = 15.0
FILE_BYTES = 256 * 2**10
"""Size at which a file ends and the next begins in an object store, where each is written whole again as it grows."""
JOINED, MOST_JOINS = 4, 3
"""Files that have ended and are joined to one, so many of these in turn, and how often at most: up to 16 MiB."""
UPLOAD_RATE = 4 * 2**10
"""Bytes a second at most, over time, of files that grow: .35 GB a day. A full file takes a minute of that."""
MOST_WAITING = 10_000
Record = tuple[int, float, dict[str, float]]
"""Step, time of the clock (for display), values by name."""


class Telemetry:
    """Scalars by step, in event files below `<prefix>/tensorboard/`, written by a thread of its own.

    On a local disk they are one file, within about a second; an object store gets them every `upload_seconds`, more
    rarely as a file grows, and at `close`, in few files: small ones are joined, and go once the joined one is there.
    What can't be written is warned of once and tried again.
    """

    def __init__(self, store: Store, prefix: str, upload_seconds: float = UPLOAD_SECONDS):
        self._store, self._key, self._upload_seconds = store, f"{prefix}/{FOLDER}", upload_seconds
        # Appending never waits; past so many records that can't be written the oldest go.
        self._records: deque[Record] = deque(maxlen=MOST_WAITING)
        self._closing = threading.Event()
        self._warned = False
        self._tried_bytes = 0  # of the last upload, also where it was refused
        self._thread = threading.Thread(target=self._work, name="telemetry", daemon=True)
        self._thread.start()

    def record(self, step: int, values: Mapping[str, float | None]) -> None:
        """Note values at a global step, each a curve under its name; None is left out. Takes microseconds."""
        known = {name: float(value) for name, value in values.items() if value is not None}
        self._records.append((step, time.time(), known))

    def close(self) -> None:
        """Write what is left, waiting CLOSE_SECONDS at most. Never raises; a second time does nothing."""
        self._closing.set()
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._warn(f"{self._store.url}/{self._key}: storage is slow, the last curves may be missing")

    def _work(self) -> None:
        with ExitStack() as stack:
            try:
                folder = self._folder(stack)
            except (StorageError, OSError) as error:
                self._warn(f"no curves: {error}")
                return
            files = EventFiles(folder, FILE_BYTES if self._store.local is None else None)
            stack.callback(files.end_file)
            due = time.monotonic() + self._upload_seconds
            while not self._closing.wait(FLUSH_SECONDS):
                self._write(files)
                if time.monotonic() >= due:
                    self._upload(files)
                    due = time.monotonic() + max(self._upload_seconds, self._tried_bytes / UPLOAD_RATE)
            self._write(files)
            if not self._upload(files):
                self._upload(files)

    def _folder(self, stack: ExitStack) -> Path:
        if self._store.local is not None:
            return self._store.local / self._key
        return stack.enter_context(scratch_folder(None))

    def _write(self, files: "EventFiles") -> None:
        try:
            while self._records:
                files.add(self._records[0])
                self._records.popleft()
            files.flush()
        except OSError as error:
            self._warn(f"{self._store.url}/{self._key}: curves can't be written, trying on: {error}")
            with suppress(OSError):
                files.give_up_file()

    def _upload(self, files: "EventFiles") -> bool:
        """Upload what has changed; True if the object store, if that is what it is, has all that is written."""
        if self._store.local is not None:
            return True
        self._tried_bytes = 0
        try:
            for path in files.changed():
                # A joined one comes rarely, and isn't to hold up the next: each byte is in MOST_JOINS of them at most.
                self._tried_bytes += min(path.stat().st_size, FILE_BYTES)
                self._store.write(f"{self._key}/{path.name}", path)
                for name in files.uploaded(path):
                    with suppress(StorageError):  # to an island that mayn't delete a point twice is no harm
                        self._store.delete_one(f"{self._key}/{name}")
        except (StorageError, OSError) as error:
            self._warn(f"curves can't be uploaded, trying on: {error}")
            return False
        return True

    def _warn(self, text: str) -> None:
        if not self._warned:
            print(f"warning: {text}", file=sys.stderr)
        self._warned = True


class EventFiles:
    """The event files of one attempt, numbered in a folder; the last one is being written.

    A file ends at `file_bytes` (None: never). As many as JOINED that have ended so, and have been joined as often, are
    joined to the first of them.
    """

    def __init__(self, folder: Path, file_bytes: int | None):
        self._folder, self._file_bytes = folder, file_bytes
        self._number = 0
        self._writer: EventsWriter | None = None
        self._path = folder
        self._sizes: dict[Path, int] = {}  # of what was uploaded
        self._ended: list[tuple[Path, int]] = []  # those that may be joined, and how often they were
        self._absorbed: dict[
            Path, list[str]
        ] = {}  # by the file that has their events, those that are yet to be deleted

    def add(self, record: Record) -> None:
        """Write one record, which is surely on disk only after `flush`. Raises OSError."""
        step, at, values = record
        if self._writer is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._number += 1
            number = f".{self._number:06d}"
            self._writer = EventsWriter(str(self._folder / "events"), number)
            self._path = next(self._folder.glob(f"events.*{number}"))
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        self._writer.write_event(Event(step=step, wall_time=at, summary=summary))

    def flush(self) -> None:
        """Have all records on disk; a file that is large enough ends here. Raises OSError."""
        if self._writer is None:
            return
        self._writer.flush()
        size = self._path.stat().st_size  # raises where somebody has deleted it
        if self._file_bytes is not None and size >= self._file_bytes:
            self.end_file()
            self._ended.append((self._path, 0))
            self._join()

    def end_file(self) -> None:
        """Close the file, if there is one; the next record begins another. Raises OSError."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def give_up_file(self) -> None:
        """Close a file that may be torn, after which nothing is joined to those so far. Raises OSError."""
        self._ended.clear()
        self.end_file()

    def _join(self) -> None:
        """Join the last files while as many were joined equally often. Raises OSError, having lost nothing."""
        while len(last := self._ended[-JOINED:]) == JOINED and last[0][1] == last[-1][1] < MOST_JOINS:
            (first, joins), *others = last
            del self._ended[-JOINED:]
            joined = first.with_name("joined")
            with joined.open("wb") as file:
                file.write(first.read_bytes())
                for path, _ in others:
                    events = path.read_bytes()
                    # Behind the record that begins each file: its length, two checksums, the version of the format.
                    file.write(events[16 + int.from_bytes(events[:8], "little") :])
            joined.replace(first)
            self._ended.append((first, joins + 1))
            for path, _ in others:
                path.unlink()
                self._sizes.pop(path, None)
                self._absorbed.setdefault(first, []).extend([path.name, *self._absorbed.pop(path, [])])

    def changed(self) -> list[Path]:
        """Files that aren't uploaded as they are now, in their order."""
        paths = sorted(self._folder.glob("events.*"))
        return [path for path in paths if self._sizes.get(path) != path.stat().st_size]

    def uploaded(self, path: Path) -> list[str]:
        """Note a file as uploaded as it is now; one that will not change any more isn't kept.

        Returns the names of files whose events it has now.
        """
        self._sizes[path] = path.stat().st_size
        growing = self._writer is not None and path == self._path
        if not growing and all(path != each or joins == MOST_JOINS for each, joins in self._ended):
            path.unlink()
        return self._absorbed.pop(path, [])
