"""Records of all chunks of a stage on the local disk, one in memory at a time: for 150 million rows they take 3 GB."""

import os
import pickle
import tempfile
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Generic

from ddm_ray.data.read_ahead import read_ahead
from ddm_ray.data.sharded.chunk_store import ChunkStore, RecordT
from ddm_ray.run.chunk_records import ChunkKey
from ddm_ray.store.refusals import as_temporary_error

MAX_READERS = 16


class KeptRecords(Collection[RecordT], Generic[RecordT]):
    """Records with only their keys in memory. Can be iterated repeatedly, in the plan's order.

    They are stored in an unnamed temporary file, which disappears with the process. Raises StorageError if the disk is
    full.
    """

    def __init__(self) -> None:
        with as_temporary_error():
            self._file = tempfile.TemporaryFile()  # noqa: SIM115
        self._places: dict[ChunkKey, tuple[int, int]] = {}  # begin and size in bytes
        self._end = 0

    @classmethod
    def of(cls, chunks: ChunkStore[Any, RecordT]) -> "KeptRecords[RecordT]":
        """All current records of an artifact. Raises CorruptArtifact."""
        records = cls()
        records.read(chunks, chunks.finished_keys())
        return records

    def read(self, chunks: ChunkStore[Any, RecordT], keys: Iterable[ChunkKey]) -> None:
        """Add the records of these chunks, read concurrently. Raises CorruptArtifact."""
        for record in read_ahead(chunks.record, keys, MAX_READERS):
            self.add(record)

    def add(self, record: RecordT) -> None:
        """Add a record. Each may be added once."""
        data = pickle.dumps(record, protocol=5)
        with as_temporary_error():
            self._file.write(data)
        self._places[record.key] = self._end, len(data)
        self._end += len(data)

    @property
    def keys(self) -> Collection[ChunkKey]:
        """The keys of all records, in the order of their addition."""
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
