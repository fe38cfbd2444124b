"""Curves of a training attempt as TensorBoard's event file. Training never waits for storage here."""

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.summary_pb2 import Summary

from ddm_ray.data.scratch import scratch_folder
from ddm_ray.errors import StorageError
from ddm_ray.store.store import Store

FOLDER = "tensorboard"
CLOSE_SECONDS = 15.0


class Telemetry:
    """Scalars by step, in a file below `<prefix>/tensorboard/`, which a thread writes.

    On a local disk the file grows with each record; an object store gets the whole file at each `upload`, and at
    `close`; an upload that fails is made up for by the next one. A disk that refuses a record ends the curves. Either
    prints one warning.
    """

    def __init__(self, store: Store, prefix: str):
        self._store, self._key, self._warned = store, f"{prefix}/{FOLDER}", False
        self._path: Path | None = None  # the file, once it has a record
        self._uploaded = 0  # its size at the last upload
        self._work = SimpleQueue[Callable[[], None] | None]()
        self._writer: EventsWriter | None = None
        self._thread = Thread(target=self._run, name="telemetry", daemon=True)
        self._thread.start()

    def record(self, step: int, values: Mapping[str, float | None]) -> None:
        """Add a point to the curves of these names at a global step; None is left out. Takes microseconds."""
        tags = [
            Summary.Value(tag=name, simple_value=float(value)) for name, value in values.items() if value is not None
        ]
        event = Event(step=step, wall_time=time.time(), summary=Summary(value=tags))
        if self._thread.is_alive():
            self._work.put(lambda: self._add(event))

    def upload(self) -> None:
        """Upload all records so far to an object store, in the background. Takes microseconds."""
        self._work.put(self._upload)

    def close(self) -> None:
        """Write the rest, waiting CLOSE_SECONDS at most. Never raises; a second call does nothing."""
        self.upload()
        self._work.put(None)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._warn(f"{self._store.url}/{self._key}: storage is slow, the last curves may be missing")

    def _run(self) -> None:
        try:
            with ExitStack() as stack:
                local = self._store.local
                self._folder = stack.enter_context(scratch_folder(None)) if local is None else local / self._key
                while work := self._work.get():
                    work()
                if self._writer:
                    self._writer.close()
        except (StorageError, OSError) as error:
            self._warn(f"{self._store.url}/{self._key}: the curves end here: {error}")

    def _add(self, event: Event) -> None:
        if self._writer is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._writer = EventsWriter(str(self._folder / "events"))
            (self._path,) = self._folder.glob("events.*")
        self._writer.write_event(event)
        self._writer.flush()

    def _upload(self) -> None:
        if self._store.local is not None or self._path is None:
            return
        if (size := self._path.stat().st_size) == self._uploaded:
            return
        try:
            self._store.write(f"{self._key}/{self._path.name}", self._path)
            self._uploaded = size
        except StorageError as error:
            self._warn(f"{self._store.url}/{self._key}: curves can't be written, trying on: {error}")

    def _warn(self, text: str) -> None:
        if not self._warned:
            print(f"warning: {text}", file=sys.stderr)
        self._warned = True
