"""Files of shards that are written before their shards are: a record of each, by which a killed partition goes on."""

import base64
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import numpy as np

from ddm_ray.data.partition.file_plan import ShardFile
from ddm_ray.data.partition.tally import Tally
from ddm_ray.data.schema import data_dtype
from ddm_ray.errors import CorruptArtifact
from ddm_ray.storage.graph import PARTITION, shard
from ddm_ray.storage.manifest import FileRecord
from ddm_ray.storage.run import Run
from ddm_ray.storage.sealed import canonical, read_sealed, seal, sha256, unseal

FOLDER = f"{PARTITION}/_files"


@dataclass(frozen=True)
class MadeFile:
    """A file of a shard that is on storage, its number of rows, and their tally."""

    file: ShardFile
    record: FileRecord
    rows: int
    tally: Tally


class MadeFiles:
    """Records of files of one partition: those of another's rows, centroids or plan are another folder's.

    Can be pickled.
    """

    def __init__(self, run: Run, centroids: str | None, file_bytes: int):
        self._run = run
        identity = run.identity(PARTITION)
        made_of = [identity.fields, identity.inputs, centroids, run.generation, file_bytes]
        self._folder = f"{FOLDER}/{sha256(canonical(made_of))[:16]}"

    def put(self, made: MadeFile) -> None:
        """Record a file that is written."""
        values = base64.b64encode(zlib.compress(made.tally.values_V.astype("<i8").tobytes())).decode()
        body = {
            "record": asdict(made.record),
            "rows": made.rows,
            "counts": made.tally.counts_C.tolist(),
            "values": values,
        }
        self._run.store.write(self._key(made.file), seal(body))

    def find(self, files: Iterable[ShardFile]) -> dict[int, MadeFile]:
        """The files that have a record and are there, by their places. One that is damaged is as one that isn't."""
        recorded = self._run.store.sizes(self._folder)
        files = [file for file in files if _name(file) in recorded]
        sizes = {cluster: self._run.store.sizes(shard(cluster)) for cluster in {file.cluster for file in files}}
        counting: dict[int, MadeFile] = {}
        for file in files:
            made = self._read(file)
            if made and sizes[file.cluster].get(file.name(self._run.generation)) == made.record.bytes:
                counting[file.place] = made
        return counting

    def _read(self, file: ShardFile) -> MadeFile | None:
        key, tally = self._key(file), Tally.none(self._run.config.data)
        try:
            body = unseal(
                read_sealed(self._run.store, key),
                f"{self._run.url}/{key}",
                ["record", "rows", "counts", "values"],
            )
        except (CorruptArtifact, FileNotFoundError):
            return None
        values_V = np.frombuffer(zlib.decompress(base64.b64decode(body["values"])), "<i8")
        counted = Tally(
            data_dtype(self._run.config.data), np.array(body["counts"], np.int64), values_V.astype(np.int64)
        )
        tally.join(counted)
        return MadeFile(file, FileRecord(**body["record"]), body["rows"], tally)

    def _key(self, file: ShardFile) -> str:
        return f"{self._folder}/{_name(file)}"


def clear_records(run: Run) -> None:
    """Delete the records of files, those of an earlier partition that was begun too: their shards are committed."""
    run.store.delete(FOLDER)


def _name(file: ShardFile) -> str:
    return f"{file.cluster:06d}-{file.split}-{file.number:06d}.json"
