"""Records of all chunks of a stage on the local disk: 3 GB of 150 million rows; a driver uses one at a time."""

import os
import pickle
import tempfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Generic

from ddm_ray.data.read_ahead import read_ahead
from ddm_ray.data.sharded.chunk_store import MAX_READERS, ChunkStore, RecordT
from ddm_ray.run.chunk_records import ChunkKey
from ddm_ray.store.refusals import as_storage_error


def as_temporary_error() -> AbstractContextManager[None]:
    """Turn what the local disk refuses in the system's temporary folder into a StorageError of one line."""
    return as_storage_error(Path(tempfile.gettempdir()), "make room there, or name another folder by TMPDIR")


class KeptRecords(Collection[RecordT], Generic[RecordT]):
    """Records, in memory by their keys alone: gone through in the plan's order, as often as one likes.

    They lie in a temporary file that has no name, and ends with the process. Raises StorageError where it is full.
    """

    def __init__(self) -> None:
        with as_temporary_error():
            self._file = tempfile.TemporaryFile()  # noqa: SIM115
        self._places: dict[ChunkKey, tuple[int, int]] = {}  # begin and size in bytes
        self._end = 0

    @classmethod
    def of(cls, chunks: ChunkStore[Any, RecordT]) -> "KeptRecords[RecordT]":
        """All records that an artifact has by now. Raises CorruptArtifact."""
        records = cls()
        records.read(chunks, chunks.finished_keys())
        return records

    def read(self, chunks: ChunkStore[Any, RecordT], keys: Iterable[ChunkKey]) -> None:
        """Add the records of these chunks, which are read side by side. Raises CorruptArtifact."""
        for record in read_ahead(chunks.record, keys, MAX_READERS):
            self.add(record)

    def add(self, record: RecordT) -> None:
        """Add a record, once."""
        data = pickle.dumps(record, protocol=5)
        with as_temporary_error():
            self._file.write(data)
        self._places[record.key] = self._end, len(data)
        self._end += len(data)

    @property
    def keys(self) -> Collection[ChunkKey]:
        """The keys of all, in the order in which they came."""
        return self._places.keys()

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, record: object) -> bool:
        return getattr(record, "key", None) in self._places

    def __iter__(self) -> Iterator[RecordT]:
        with as_temporary_error():
            self._file.flush()
        for key in sorted(self._places):
            begin, size = self._places[key]
            yield pickle.loads(os.pread(self._file.fileno(), size, begin))
