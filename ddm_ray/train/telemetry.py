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
"""Size at which a file ends and the next begins: in an object store each is written whole again as it grows."""
UPLOAD_RATE = 4 * 2**10
"""Bytes a second at most, over time: .35 GB a day. A full file takes a minute of that."""
MOST_WAITING = 10_000
Record = tuple[int, float, dict[str, float]]
"""Step, time of the clock (for display), values by name."""


class Telemetry:
    """Scalars by step, in event files below `<prefix>/tensorboard/`, written by a thread of its own.

    On a local disk they are there within about a second; an object store gets them every `upload_seconds`, more rarely
    as a file grows, and at `close`. What can't be written is warned of once and tried again.
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
            files = EventFiles(folder)
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
                files.end_file()  # it may be torn: the next try begins another

    def _upload(self, files: "EventFiles") -> bool:
        """Upload what has changed; True if the object store, if that is what it is, has all that is written."""
        if self._store.local is not None:
            return True
        self._tried_bytes = 0
        try:
            for path in files.changed():
                self._tried_bytes += path.stat().st_size
                self._store.write(f"{self._key}/{path.name}", path)
                files.uploaded(path)
        except (StorageError, OSError) as error:
            self._warn(f"curves can't be uploaded, trying on: {error}")
            return False
        return True

    def _warn(self, text: str) -> None:
        if not self._warned:
            print(f"warning: {text}", file=sys.stderr)
        self._warned = True


class EventFiles:
    """The event files of one attempt, numbered in a folder; the last one is being written."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._number = 0
        self._writer: EventsWriter | None = None
        self._path = folder
        self._sizes: dict[Path, int] = {}  # of what was uploaded

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
        if self._writer is not None:
            self._writer.flush()
            if self._path.stat().st_size >= FILE_BYTES:
                self.end_file()

    def end_file(self) -> None:
        """Close the file, if there is one; the next record begins another. Raises OSError."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def changed(self) -> list[Path]:
        """Files that aren't uploaded as they are now, in their order."""
        paths = sorted(self._folder.glob("events.*"))
        return [path for path in paths if self._sizes.get(path) != path.stat().st_size]

    def uploaded(self, path: Path) -> None:
        """Note a file as uploaded as it is now; one that has ended isn't kept."""
        self._sizes[path] = path.stat().st_size
        if self._writer is None or path != self._path:
            path.unlink()
