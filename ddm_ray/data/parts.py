"""Rows being made, part by part, on storage: the plan of a source's units, and a record of every finished chunk.

The store decides between rivals and against kills: a plan or record is created if absent, after the files it names.
"""

import hashlib
import os
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ddm_ray.config import RunConfig
from ddm_ray.data.order import ranks
from ddm_ray.data.reasons import commonest
from ddm_ray.data.schema import HELDOUT, read_parquet, to_parquet
from ddm_ray.data.sources import Source, Unit
from ddm_ray.errors import ConfigError, CorruptArtifact, DataError, DriftError
from ddm_ray.storage.manifest import FileRecord, Identity, canonical, drift, verify
from ddm_ray.storage.records import PLAN, RECORDS, Place, places_done, seal, unseal
from ddm_ray.storage.run import ROWS, Run, owner_rows

REJECTED = "_rejected"
NULL = "_null_text/NULL_TEXT.json"
READERS = 16
AHEAD = 4
HASH = np.dtype("<u8")
_UNITS = pa.schema(
    [("key", pa.string()), ("bytes", pa.int64()), ("files", pa.list_(pa.string())), ("sizes", pa.list_(pa.int64()))]
)


@dataclass(frozen=True)
class Plan:
    """What a source was when the rows were begun; every later command goes by it.

    `ignored`: how many files of it no unit reads, by the endings of their names.
    """

    source: str
    chunk_rows: int
    classes: tuple[str, ...] | None
    units: tuple[Unit, ...]
    ignored: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Record:
    """A finished chunk: its rows and their files, and what the rows' manifest is made of.

    `digest`: of the rows' contents; None, as is `part`, if no row was usable. `reasons`: a file with each rejected
    row's. The hashes are 8 bytes a row.
    """

    place: Place
    rows: int
    heldout: int
    rejected: int
    embedding_dim: int
    digest: str | None
    part: tuple[str, FileRecord] | None
    reasons: tuple[str, FileRecord] | None
    commonest: list[dict[str, Any]]
    id_hashes_N: np.ndarray
    content_hashes_N: np.ndarray

    @property
    def files(self) -> dict[str, FileRecord]:
        """Its files by name below the artifact."""
        return dict(file for file in (self.part, self.reasons) if file)

    def to_json(self) -> bytes:
        """Sealed by a checksum over itself."""
        body = {**vars(self), "place": asdict(self.place)}
        for name in ("part", "reasons"):
            body[name] = [body[name][0], asdict(body[name][1])] if body[name] else None
        for name in ("id_hashes_N", "content_hashes_N"):
            body[name] = b64encode(body[name].astype(HASH).tobytes()).decode()
        return seal(body)

    @classmethod
    def from_json(cls, data: bytes, where: str) -> "Record":
        """Raises CorruptArtifact naming `where` if it was altered."""
        body = unseal(data, where, cls.__dataclass_fields__)
        body["place"] = Place(**body["place"])
        for name in ("part", "reasons"):
            body[name] = (body[name][0], FileRecord(**body[name][1])) if body[name] else None
        for name in ("id_hashes_N", "content_hashes_N"):
            body[name] = np.frombuffer(b64decode(body[name]), HASH)
        return cls(**body)


class Parts:
    """An artifact of rows while it is made: `rows`, or one owner's."""

    def __init__(self, run: Run, artifact: str):
        self.run, self.store, self.artifact = run, run.store, artifact
        self.url = f"{run.url}/{artifact}"

    def settle(
        self, pointer: str, suffix: str, make: Callable[[], tuple[bytes, dict[str, Any]]], needs: Iterable[str] = ()
    ) -> tuple[bytes, Any]:
        """A file that is made once, with its fields: what is there, else what `make` makes, or a rival meanwhile.

        `pointer`: key of the JSON object that names it. Raises CorruptArtifact if either was altered, or the object
        lacks the fields that the caller `needs`.
        """
        folder = pointer.rpartition("/")[0]
        where = f"{self.url}/{pointer}"
        if not self.store.exists(f"{self.artifact}/{pointer}"):
            data, fields = make()
            record = FileRecord.of(data)
            name = f"{record.sha256[:16]}{suffix}"
            self.store.write(f"{self.artifact}/{folder}/{name}", data)
            named = {"file": name, "file_record": asdict(record)}
            self.store.create(f"{self.artifact}/{pointer}", seal({**fields, **named}))
        try:
            fields = unseal(self.store.read(f"{self.artifact}/{pointer}"), where, ["file", "file_record", *needs])
            name = fields.pop("file")
            where = f"{self.url}/{folder}/{name}"
            data = self.store.read(f"{self.artifact}/{folder}/{name}")
            return verify(data, FileRecord(**fields.pop("file_record")), where), fields
        except FileNotFoundError:
            raise CorruptArtifact(f"{where}: gone; {self.run.anew(self.artifact)}") from None
        except CorruptArtifact as error:
            raise CorruptArtifact(f"{error}; {self.run.anew(self.artifact)}") from None

    def settled(self, pointer: str, suffix: str) -> bytes:
        """What `settle` made. Raises CorruptArtifact if it is gone or altered."""

        def gone() -> tuple[bytes, dict[str, Any]]:
            raise CorruptArtifact(f"{self.url}/{pointer}: gone; {self.run.anew(self.artifact)}")

        return self.settle(pointer, suffix, gone)[0]

    def plan(self, make: Callable[[], Plan]) -> Plan:
        """The plan that the rows were begun with, else what `make` makes of the source, once for all.

        Raises DriftError if it was made under other configuration, CorruptArtifact.
        """

        def listed() -> tuple[bytes, dict[str, Any]]:
            plan = make()
            fields = {name: value for name, value in vars(plan).items() if name != "units"}
            units = pa.Table.from_pylist([asdict(unit) for unit in plan.units], schema=_UNITS)
            identity = self.run.identity(self.artifact).fields
            return to_parquet(units), {**fields, "units": len(plan.units), "config": identity}

        needs = [*Plan.__dataclass_fields__, "config"]
        data, fields = self.settle(PLAN, ".parquet", listed, needs)
        if lines := drift(self.run.identity(self.artifact), Identity(fields["config"])):
            raise DriftError(f"{self.url} was begun otherwise: {'; '.join(lines)}; {self.run.anew(self.artifact)}")
        rows = read_parquet(data, f"{self.url}/{PLAN}").to_pylist()
        units = (Unit(row["key"], row["bytes"], tuple(row["files"]), tuple(row["sizes"])) for row in rows)
        classes = tuple(fields["classes"]) if fields["classes"] is not None else None
        return Plan(fields["source"], fields["chunk_rows"], classes, tuple(units), fields["ignored"])

    def begun_with(self) -> str | None:
        """The source of the plan, if there is one."""
        try:
            data = self.store.read(f"{self.artifact}/{PLAN}")
        except FileNotFoundError:
            return None
        try:
            source: str = unseal(data, f"{self.url}/{PLAN}", ["source"])["source"]
        except CorruptArtifact as error:
            raise CorruptArtifact(f"{error}; {self.run.anew(self.artifact)}") from None
        return source

    def places(self) -> list[Place]:
        """The places of all finished chunks, in the source's order."""
        return places_done(self.store, self.artifact)

    def record(self, place: Place) -> Record:
        """Of a finished chunk. Raises CorruptArtifact naming it."""
        where = f"{self.url}/{RECORDS}/{place.name}"
        try:
            found = Record.from_json(self.store.read(f"{self.artifact}/{RECORDS}/{place.name}"), where)
        except CorruptArtifact as error:
            raise CorruptArtifact(f"{error}; delete it, then: {self.run.command(self.artifact)}") from None
        if found.place != place:
            raise CorruptArtifact(f"{where}: is another's; delete it, then: {self.run.command(self.artifact)}")
        return found

    def records(self, places: Iterable[Place]) -> list[Record]:
        """Several, read side by side."""
        with ThreadPoolExecutor(READERS) as pool:
            return list(pool.map(self.record, places))

    def has(self, place: Place) -> bool:
        """Whether the chunk is finished."""
        return self.store.exists(f"{self.artifact}/{RECORDS}/{place.name}")

    def write(self, place: Place, table: pa.Table, embedding_dim: int, rejected: list[dict[str, str]]) -> None:
        """Finish a chunk: its usable rows and its rejected ones ({id, reason}), then the record.

        Where a rival recorded the chunk first, its files count and ours are deleted.
        """
        part = self._put(f"part-{place.stem}", ".parquet", to_parquet(table)) if table.num_rows else None
        reasons = self._put(f"{REJECTED}/{place.stem}", ".json", canonical(rejected)) if rejected else None
        record = Record(
            place=place,
            rows=table.num_rows,
            heldout=table["split"].to_pylist().count(HELDOUT),
            rejected=len(rejected),
            embedding_dim=embedding_dim,
            digest=content_digest(table) if table.num_rows else None,
            part=part,
            reasons=reasons,
            commonest=commonest(rejected),
            id_hashes_N=ranks(table["id"].to_pylist()),
            content_hashes_N=np.array([int(sha[:16], 16) for sha in table["content_hash"].to_pylist()], HASH),
        )
        if not self.store.create(f"{self.artifact}/{RECORDS}/{place.name}", record.to_json()):
            for name in record.files.keys() - self.record(place).files.keys():
                self.store.delete_one(f"{self.artifact}/{name}")

    def _put(self, stem: str, suffix: str, data: bytes) -> tuple[str, FileRecord]:
        record = FileRecord.of(data)
        name = f"{stem}-{record.sha256[:8]}{suffix}"
        self.store.write(f"{self.artifact}/{name}", data)
        return name, record

    def read_part(self, record: Record, columns: list[str]) -> pa.Table:
        """Some columns of a finished chunk's rows, in that order. Raises CorruptArtifact if its part is altered."""
        assert record.part
        data = self._verified(record, *record.part)
        return read_parquet(data, f"{self.url}/{record.part[0]}", columns).select(columns)

    def read_parts(self, records: Iterable[Record], columns: list[str]) -> Iterator[pa.Table]:
        """`read_part` of each, in order; AHEAD parts are read at once."""
        with ThreadPoolExecutor(AHEAD) as pool:
            coming = deque[Future[pa.Table]]()
            for record in records:
                if len(coming) == AHEAD:
                    yield coming.popleft().result()
                coming.append(pool.submit(self.read_part, record, columns))
            while coming:
                yield coming.popleft().result()

    def _verified(self, record: Record, name: str, there: FileRecord) -> bytes:
        try:
            return verify(self.store.read(f"{self.artifact}/{name}"), there, f"{self.url}/{name}")
        except FileNotFoundError:
            raise CorruptArtifact(f"{self.url}/{name}: gone; {self.redo(record)}") from None
        except CorruptArtifact as error:
            raise CorruptArtifact(f"{error}; {self.redo(record)}") from None

    def redo(self, record: Record) -> str:
        """How to make a chunk anew."""
        return f"delete {self.url}/{RECORDS}/{record.place.name}, then: {self.run.command(self.artifact)}"


def list_source(config: RunConfig, name: str, source: Source, chunk_rows: int) -> Plan:
    """The plan for rows of a source that is called `name`.

    Raises DataError if it would name the classes by its folders, though shards are given; and as `Source.units`.
    """
    units = tuple(source.units())
    if config.partition.method == "given" and source.classes is not None:
        raise DataError(
            f"source {name}: data.num_classes only counts the classes, and owners' folders would mean other classes at"
            " each; begin the run anew and name them with data.class_names"
        )
    return Plan(name, chunk_rows, source.classes, units, source.ignored)


def rows_artifact(run: Run, cluster: int | None) -> str:
    """The artifact that `prepare` makes, of owner `cluster` where shards are given. Raises ConfigError."""
    num_clusters = run.config.partition.num_clusters
    if run.config.partition.method != "given":
        if cluster is not None:
            raise ConfigError(
                f"{run.url}: --cluster is for shards that are given (partition.method given); leave it out"
            )
        return ROWS
    if cluster is None:
        raise ConfigError(f"{run.url}: shards are given; say whose rows these are: --cluster 0 to {num_clusters - 1}")
    if not 0 <= cluster < num_clusters:
        raise ConfigError(f"--cluster {cluster}: this run has clusters 0 to {num_clusters - 1}")
    return owner_rows(cluster)


def source_of(parts: Parts, source: str | None, cluster: int | None) -> str:
    """Where the rows come from: as they were begun or finished, else `source` of an owner, else as configured.

    Raises DriftError if they were begun from another than `source`, ConfigError if it is missing or not to be given.
    """
    run = parts.run
    if cluster is None and source is not None:
        raise ConfigError(
            f"{run.url}: --source is for shards that are given; otherwise set data.source when the run begins"
        )
    source = _absolute(source) if source is not None else None
    finished = run.finished(parts.artifact)
    began: str | None = finished.info["source"] if finished else parts.begun_with()
    if began is not None and source not in (None, began):
        raise DriftError(f"{parts.url} was begun from {began}, not from {source}; {run.anew(parts.artifact)}")
    if cluster is not None and not (began or source):
        raise ConfigError(f"{run.url}: name the images of owner {cluster} with --source URI")
    return began or source or _absolute(run.config.data.source)


def _absolute(source: str) -> str:
    # Ray's workers stand in other folders.
    if "://" in source or source == "digits" or source.startswith("shapes:"):
        return source
    return os.path.abspath(Path(source).expanduser())


def content_digest(table: pa.Table) -> str:
    """Hex SHA-256 of what a table's rows hold, whatever file they are in."""
    found = hashlib.sha256(canonical([[field.name, str(field.type)] for field in table.schema]))
    for values in table.combine_chunks().columns:
        if values.type == pa.int64():
            found.update(values.to_numpy().astype("<i8").tobytes())
            continue
        if not pa.types.is_fixed_size_binary(values.type):
            found.update(pc.binary_length(values).to_numpy().astype("<i8").tobytes())
        for value in values:
            found.update(value.as_buffer())
    return found.hexdigest()
