"""Files of shards, written before the shards are committed; their records let a killed partition resume."""

import base64
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ddm_ray.data.partition.file_plan import ShardFile, write_rows
from ddm_ray.data.partition.state import ExpectedShard
from ddm_ray.data.partition.tally import Tally
from ddm_ray.data.schema import TRAIN, data_dtype, shard_file_schema
from ddm_ray.errors import CorruptArtifact
from ddm_ray.run.graph import PARTITION, Artifact, shard
from ddm_ray.run.manifest import FileRecord
from ddm_ray.run.run import Run
from ddm_ray.store.checksummed import canonical, read_sealed, seal, sha256, unseal
from ddm_ray.store.refusals import as_temporary_error

FOLDER = f"{PARTITION}/_files"


@dataclass(frozen=True)
class MadeFile:
    """A shard's file on storage, its number of rows, and their tally."""

    file: ShardFile
    record: FileRecord
    rows: int
    tally: Tally


class MadeFiles:
    """Files of the expected shards, by their places, and the files' records. Can be pickled.

    Records of files of other rows, centroids, clusters or plans are in other folders.
    """

    def __init__(self, run: Run, expected: Mapping[int, ExpectedShard], file_bytes: int, clusters: Sequence[int] = ()):
        """`clusters`: numbers of all that the rows are divided into, also of those with finished shards."""
        self._run, self._expected, self._generation = run, expected, run.config.changes.generation
        made_of: list[Any] = [self._generation, file_bytes, list(clusters)]
        for shard_made in list(expected.values())[:1]:  # all shards have the same identity and centroids
            made_of += [shard_made.identity.fields, shard_made.identity.inputs, shard_made.centroids]
        self._folder = f"{FOLDER}/{sha256(canonical(made_of))[:16]}"

    def write(self, file: ShardFile, rows: pa.Table) -> MadeFile | None:
        """Write a file of these rows, in any order, and its record. None if a concurrent writer has finished the shard.

        Raises StorageError, also if the system's temporary folder is full.
        """
        if self._expected[file.cluster].finished():
            return None
        tally = Tally.none(self._run.config.data)
        schema = shard_file_schema(self._run.config.data)
        with as_temporary_error(), tempfile.TemporaryDirectory(prefix="ddm-shard-") as folder:
            path = Path(folder, "file.parquet")
            write_rows(path, rows, schema, tally if file.split == TRAIN else None)
            record = FileRecord.of_file(path)
            self._run.store.write(f"{self._shard(file.cluster)}/{file.name(self._generation)}", path)
        written = MadeFile(file, record, rows.num_rows, tally)
        self.put(written)
        return written

    def put(self, made: MadeFile) -> None:
        """Record a written file."""
        values = base64.b64encode(zlib.compress(made.tally.values_V.astype("<i8").tobytes())).decode()
        body = {
            "record": asdict(made.record),
            "rows": made.rows,
            "counts": made.tally.counts_C.tolist(),
            "values": values,
        }
        self._run.store.write(self._key(made.file), seal(body))

    def find(self, files: Iterable[ShardFile]) -> Iterator[MadeFile]:
        """Yield those of the files that have a record and exist. A damaged record counts as missing."""
        recorded = self._run.store.sizes(self._folder)
        files = [file for file in files if _name(file) in recorded]
        sizes = {place: self._run.store.sizes(self._shard(place)) for place in {file.cluster for file in files}}
        for file in files:
            made = self._read(file)
            if made and sizes[file.cluster].get(file.name(self._generation)) == made.record.bytes:
                yield made

    def clear(self) -> None:
        """Delete the records once the shards are committed."""
        self._run.store.delete(self._folder)

    def _shard(self, place: int) -> Artifact:
        return shard(self._expected[place].cluster)

    def _read(self, file: ShardFile) -> MadeFile | None:
        key = self._key(file)
        try:
            body = unseal(
                read_sealed(self._run.store, key),
                f"{self._run.url}/{key}",
                ["record", "rows", "counts", "values"],
            )
        except (CorruptArtifact, FileNotFoundError):
            return None
        values_V = np.frombuffer(zlib.decompress(base64.b64decode(body["values"])), "<i8")
        dtype = data_dtype(self._run.config.data)
        tally = Tally(dtype, np.array(body["counts"], np.int64), values_V.astype(np.int64))
        return MadeFile(file, FileRecord(**body["record"]), body["rows"], tally)

    def _key(self, file: ShardFile) -> str:
        return f"{self._folder}/{_name(file)}"


def _name(file: ShardFile) -> str:
    return f"{file.cluster:06d}-{file.split}-{file.number:06d}.json"
