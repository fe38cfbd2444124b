"""Curves of a training attempt as TensorBoard's event file. Training never waits for storage here."""

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
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
    `close`. A write that fails is tried again; the first one prints a warning.
    """

    def __init__(self, store: Store, prefix: str):
        self._store, self._key, self._warned = store, f"{prefix}/{FOLDER}", False
        self._uploaded: tuple[Path, int] | None = None  # the file, and its size then
        self._work = SimpleQueue[Callable[[EventFile], None] | None]()
        self._thread = Thread(target=self._run, name="telemetry", daemon=True)
        self._thread.start()

    def record(self, step: int, values: Mapping[str, float | None]) -> None:
        """Add a point to the curves of these names at a global step; None is left out. Takes microseconds."""
        known = {name: float(value) for name, value in values.items() if value is not None}
        now = time.time()
        self._work.put(lambda file: file.add(step, now, known))

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
        with ExitStack() as stack:
            try:
                local = self._store.local
                folder = stack.enter_context(scratch_folder(None)) if local is None else local / self._key
            except (StorageError, OSError) as error:
                self._warn(f"no curves: {error}")
                return
            file = EventFile(folder)
            stack.callback(file.end)
            while work := self._work.get():
                try:
                    work(file)
                except (StorageError, OSError) as error:
                    self._warn(f"{self._store.url}/{self._key}: curves can't be written, trying on: {error}")

    def _upload(self, file: "EventFile") -> None:
        if self._store.local is not None or file.path is None:
            return
        if (now := (file.path, file.path.stat().st_size)) != self._uploaded:
            self._store.write(f"{self._key}/{file.path.name}", file.path)
            self._uploaded = now

    def _warn(self, text: str) -> None:
        if not self._warned:
            print(f"warning: {text}", file=sys.stderr)
        self._warned = True


class EventFile:
    """An event file in a folder, made with its first values. After an error the next values begin another file.

    The first may be torn: TensorBoard reads it up to there.
    """

    def __init__(self, folder: Path):
        self.path: Path | None = None
        self._folder, self._number = folder, 0
        self._writer: EventsWriter | None = None

    def add(self, step: int, at: float, values: Mapping[str, float]) -> None:
        """Write values at a step and a time in seconds since 1970. Raises OSError."""
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        try:
            self._writer = self._writer or self._begun()
            self._writer.write_event(Event(step=step, wall_time=at, summary=summary))
            self._writer.flush()
        except OSError:
            self.end()
            raise

    def end(self) -> None:
        """Close the file, if there is one; the next values begin another."""
        writer, self._writer = self._writer, None
        if writer is not None:
            with suppress(OSError):  # the write before it has raised the same
                writer.close()

    def _begun(self) -> EventsWriter:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._number += 1
        number = f".{self._number:06d}"
        writer = EventsWriter(str(self._folder / "events"), number)
        self.path = next(self._folder.glob(f"events.*{number}"))
        return writer
