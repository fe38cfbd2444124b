"""Long lists of an artifact's files. Such a list is a file of its own, which the manifest names and few commands read.

Every command reads whole manifests. A manifest that named a million files would take many seconds and GB.
"""

import io
from bisect import bisect_left
from collections.abc import ItemsView, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice, pairwise

import pyarrow as pa
import pyarrow.parquet as pq

from ddm_ray.errors import CorruptArtifact, DataError
from ddm_ray.run.graph import Artifact
from ddm_ray.run.manifest import AGAIN, FileRecord, Manifest, checked_name
from ddm_ray.run.run import Run
from ddm_ray.store.store import Store

FOLDER = "_files"
"""Folder of the list, below the artifact."""
MAX_NAMED = 10_000
"""Largest number of files that a manifest names itself. It is read in a quarter of a second then."""
_SCHEMA = pa.schema([("name", pa.string()), ("bytes", pa.int64()), ("sha256", pa.binary(32))])


class ListedFiles(Mapping[str, FileRecord]):
    """Records of files by name, sorted. They are in memory as in the list, with about 80 bytes each."""

    def __init__(self, data: bytes, where: str):
        """Parse a list that `named_or_listed` wrote. Raises CorruptArtifact naming `where` for anything else."""
        try:
            table = pq.read_table(pa.BufferReader(data), schema=_SCHEMA).combine_chunks()
        except (pa.ArrowException, OSError) as error:
            raise CorruptArtifact(f"{where}: no list of files ({' '.join(str(error).split())[:120]})", AGAIN) from None
        self._batches = table.to_batches(MAX_NAMED)
        if any(column.null_count for column in table.columns) or (table["bytes"].to_numpy() < 0).any():
            raise CorruptArtifact(f"{where}: no list of files, sizes or names are missing", AGAIN)
        try:
            for name in self:
                checked_name(name)
        except ValueError as error:
            raise CorruptArtifact(f"{where}: {name!r:.200}: {error}", AGAIN) from None
        if any(name >= following for name, following in pairwise(self)):
            raise CorruptArtifact(f"{where}: its names aren't in order, or come twice", AGAIN)

    def __len__(self) -> int:
        return sum(batch.num_rows for batch in self._batches)

    def __iter__(self) -> Iterator[str]:
        for batch in self._batches:
            yield from batch["name"].to_pylist()

    def __getitem__(self, name: str) -> FileRecord:
        number = bisect_left(self._batches, name, key=lambda batch: batch["name"][-1].as_py())
        if number < len(self._batches):
            names, sizes, digests = self._batches[number].columns
            row = bisect_left(range(len(names)), name, key=lambda row: names[row].as_py())
            if names[row].as_py() == name:
                return FileRecord(sizes[row].as_py(), digests[row].as_py().hex())
        raise KeyError(name)

    def items(self) -> ItemsView[str, FileRecord]:
        """All names and records, without a search for each name."""
        return _Items(self)

    def records(self) -> Iterator[FileRecord]:
        """The records in the order of their names."""
        for batch in self._batches:
            for size, digest in zip(batch["bytes"].to_pylist(), batch["sha256"].to_pylist(), strict=True):
                yield FileRecord(size, digest.hex())


class _Items(ItemsView[str, FileRecord]):
    _mapping: ListedFiles

    def __iter__(self) -> Iterator[tuple[str, FileRecord]]:
        return zip(self._mapping, self._mapping.records(), strict=True)


def list_of(manifest: Manifest) -> str | None:
    """Name of the list in a manifest; None if the manifest names all files itself."""
    return next((name for name in manifest.files if name.startswith(f"{FOLDER}/")), None)


def with_all_files(run: Run, manifest: Manifest) -> Manifest:
    """The manifest with all files of its artifact; reads its list if it has one. Raises CorruptArtifact."""
    name = list_of(manifest)
    if name is None:
        return manifest
    artifact = Artifact(manifest.artifact)
    where = f"{run.url}/{artifact}/{name}"
    return replace(manifest, files=ListedFiles(run.read(artifact, name, manifest), where))


def named_or_listed(
    store: Store, artifact: str, parts: Iterable[tuple[str, FileRecord]], others: Mapping[str, FileRecord]
) -> dict[str, FileRecord]:
    """The files that an artifact's manifest is to name: all of them, or the `others` and a list, which is written.

    The artifact must have a `content`, from which its digest is made. `parts` are read once, with MAX_NAMED in memory
    at a time. Raises StorageError, and DataError for a list that could not be read again.
    """
    left = iter(parts)
    first, batches = dict(islice(left, MAX_NAMED)), list[pa.RecordBatch]()
    while more := dict(islice(left, MAX_NAMED)):
        batches.append(_batch(more))
    if not batches:
        return {**first, **others}
    buffer = io.BytesIO()
    table = pa.Table.from_batches([_batch(first), *batches, _batch(others)]).sort_by("name")
    pq.write_table(table, buffer, compression="zstd", use_dictionary=False, write_statistics=False)
    del table, batches
    data = buffer.getvalue()
    record = FileRecord.of(data)
    # Named by its content: a rival with another version of pyarrow may write other bytes for the same names.
    name = f"{FOLDER}/{record.sha256[:16]}.parquet"
    where = f"{store.url}/{artifact}/{name}"
    try:
        ListedFiles(data, where)
    except CorruptArtifact as error:
        raise DataError(f"{where}: can't be written, as nothing could read it: {error.message}") from None
    store.write(f"{artifact}/{name}", data)
    return {**others, name: record}


def _batch(files: Mapping[str, FileRecord]) -> pa.RecordBatch:
    records = files.values()
    columns = [[*files], [record.bytes for record in records], [bytes.fromhex(record.sha256) for record in records]]
    arrays = [pa.array(values, field.type) for values, field in zip(columns, _SCHEMA, strict=True)]
    return pa.record_batch(arrays, schema=_SCHEMA)
