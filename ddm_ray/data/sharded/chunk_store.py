"""An artifact in the making on storage, chunk by chunk: the plan of its units, and a record of every finished chunk.

Concurrent commands and kills are harmless: a plan or record is created if absent, after the files that it names.
"""

from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Annotated, Any, Generic, Protocol, TypeVar, get_type_hints

import numpy as np
import pyarrow as pa
from pydantic import Field, PlainSerializer, PlainValidator, TypeAdapter, ValidationError

from ddm_ray.data.schema import read_parquet, to_parquet
from ddm_ray.errors import CorruptArtifact, DriftError
from ddm_ray.remedies import Make
from ddm_ray.run.chunk_records import PLAN, RECORDS, ChunkKey, chunks_done, recorded_keys, stem_of_file
from ddm_ray.run.graph import Artifact
from ddm_ray.run.manifest import FileName, FileRecord, Identity, read_verified
from ddm_ray.run.run import Run
from ddm_ray.store.checksummed import read_sealed, seal, unseal

HASH = np.dtype("<u8")
_COLUMNS = {str: pa.string(), int: pa.int64(), tuple[str, ...]: pa.list_(pa.string())}
_COLUMNS[tuple[int, ...]] = pa.list_(pa.int64())

StoredFile = tuple[FileName, FileRecord]
"""A file's name below the artifact, and its size and checksum."""
_FILE = TypeAdapter(StoredFile)
Hashes = Annotated[
    np.ndarray,
    PlainValidator(lambda text: np.frombuffer(b64decode(str(text)), HASH)),
    PlainSerializer(lambda hash_N: b64encode(hash_N.astype(HASH).tobytes()).decode(), return_type=str),
]
"""A record's field with eight bytes per row."""


class WorkUnit(Protocol):
    """The work of one task: a dataclass of texts, integers and tuples of them."""

    @property
    def key(self) -> str:
        """Name for messages."""
        ...

    @property
    def bytes(self) -> int:
        """Size in any measure of work, for progress."""
        ...


class Plan(Protocol):
    """The plan that an artifact is begun with and all later commands follow: a dataclass of units and plain fields."""

    @property
    def units(self) -> tuple[Any, ...]:
        """The units of work (`WorkUnit`), all of one type."""
        ...


@dataclass(frozen=True)
class ChunkRecord:
    """A finished chunk. Stages add fields: plain values, `Hashes`, and its files, each a `StoredFile | None`."""

    key: Annotated[ChunkKey, Field(alias="place")]

    @property
    def files(self) -> dict[str, FileRecord]:
        """The chunk's files by name below the artifact."""
        return dict(value for value in vars(self).values() if isinstance(value, tuple))


PlanT = TypeVar("PlanT", bound=Plan)
RecordT = TypeVar("RecordT", bound=ChunkRecord)


class ChunkStore(Generic[PlanT, RecordT]):
    """Plan, records and chunk files of an artifact. Can be pickled; opening it accesses no storage."""

    def __init__(self, run: Run, artifact: Artifact, plan_type: type[PlanT], record_type: type[RecordT]):
        self.run, self.store, self.artifact = run, run.store, artifact
        self.url = f"{run.url}/{artifact}"
        self._types = plan_type, record_type

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.run, self.artifact, *self._types)

    @cached_property
    def _plans(self) -> TypeAdapter[PlanT]:
        return TypeAdapter(self._types[0])

    @cached_property
    def _records(self) -> TypeAdapter[RecordT]:
        return TypeAdapter(self._types[1])

    def write_once(
        self, pointer: str, suffix: str, make: Callable[[], tuple[bytes, dict[str, Any]]]
    ) -> tuple[bytes, dict[str, Any]]:
        """The file that JSON object `pointer` names, and the object's other fields.

        If the object doesn't exist yet, `make` makes both; of concurrent writers, the first one counts. Raises
        CorruptArtifact if either was altered.
        """
        folder = pointer.rpartition("/")[0]
        if not self.store.exists(f"{self.artifact}/{pointer}"):
            data, fields = make()
            record = FileRecord.of(data)
            name = f"{record.sha256[:16]}{suffix}"
            self.store.write(f"{self.artifact}/{folder}/{name}", data)
            named = {"file": name, "file_record": asdict(record)}
            self.store.create(f"{self.artifact}/{pointer}", seal({**fields, **named}))
        return self.read_once(pointer)

    def read_once(self, pointer: str) -> tuple[bytes, dict[str, Any]]:
        """Read the results of `write_once`. Raises CorruptArtifact if they are missing or altered."""
        where = f"{self.url}/{pointer}"
        try:
            fields = unseal(read_sealed(self.store, f"{self.artifact}/{pointer}"), where, ["file", "file_record"])
            try:
                name, record = _FILE.validate_python([fields.pop("file"), fields.pop("file_record")])
            except ValidationError:
                raise CorruptArtifact(f"{where}: its file or file_record is of another type") from None
            key = f"{self.artifact}/{pointer.rpartition('/')[0]}/{name}"
            where = f"{self.run.url}/{key}"
            return read_verified(self.store, key, record), fields
        except FileNotFoundError:
            raise CorruptArtifact(f"{where}: gone", self.run.remake(self.artifact)) from None
        except CorruptArtifact as error:
            error.fix = self.run.remake(self.artifact)
            raise

    def plan(self, make: Callable[[], PlanT], identity: Identity | None = None) -> PlanT:
        """The plan that the artifact was begun with; if there is none, the result of `make` is stored as the plan.

        It is stored under this identity; None: the current one.

        Raises DriftError if it was made under another configuration, CorruptArtifact.
        """

        def to_files() -> tuple[bytes, dict[str, Any]]:
            fields = self._plans.dump_python(make(), mode="json")
            units = pa.Table.from_pylist(fields["units"], schema=self._unit_schema())
            under = identity or self.run.identity(self.artifact)
            made = {**fields, "units": units.num_rows, "config": under.fields}
            return to_parquet(units), made | ({"inputs": under.inputs} if under.inputs else {})

        return self._plan(*self.write_once(PLAN, ".parquet", to_files))

    def begun(self) -> PlanT | None:
        """The plan; None if there is none. Raises as `plan`."""
        return self._plan(*self.read_once(PLAN)) if self.store.exists(f"{self.artifact}/{PLAN}") else None

    def _plan(self, data: bytes, fields: dict[str, Any]) -> PlanT:
        units = read_parquet(data, f"{self.url}/{PLAN}").to_pylist()
        try:
            config, plan = fields["config"], self._plans.validate_python({**fields, "units": units})
        except (KeyError, ValidationError):
            fix = self.run.remake(self.artifact)
            raise CorruptArtifact(f"{self.url}/{PLAN}: is the plan of something else", fix) from None
        self.require_same(Identity(config, fields.get("inputs", {})))
        return plan

    def require_same(self, begun: Identity) -> None:
        """Raise DriftError unless `begun`, the identity that the artifact was begun under, is the current one."""
        if lines := self.run.drift(self.artifact, begun):
            raise DriftError(f"{self.url} was begun otherwise: {'; '.join(lines)}", self.run.remake(self.artifact))

    def _unit_schema(self) -> pa.Schema:
        unit_type = get_type_hints(self._types[0])["units"].__args__[0]
        return pa.schema([(name, _COLUMNS[kind]) for name, kind in get_type_hints(unit_type).items()])

    def finished_keys(self) -> list[ChunkKey]:
        """The keys of all finished chunks, in the plan's order."""
        return recorded_keys(self.store, self.artifact)

    def record(self, key: ChunkKey) -> RecordT:
        """A finished chunk's record. Raises CorruptArtifact naming it, FileNotFoundError if there is none."""
        where = f"{self.url}/{RECORDS}/{key.record_name}"
        data = read_sealed(self.store, f"{self.artifact}/{RECORDS}/{key.record_name}")
        body = unseal(data, where, fix=self.remake(key))
        try:
            record = self._records.validate_python(body)
        except ValidationError:
            raise CorruptArtifact(f"{where}: is the record of something else", self.remake(key)) from None
        if record.key != key:
            raise CorruptArtifact(f"{where}: is another chunk's", self.remake(key))
        return record

    def has(self, key: ChunkKey) -> bool:
        """True if the chunk is finished."""
        return self.store.exists(f"{self.artifact}/{RECORDS}/{key.record_name}")

    def put(self, key: ChunkKey, prefix: str, suffix: str, data: bytes) -> StoredFile:
        """Write a file of a chunk; its name consists of prefix, key and content hash."""
        record = FileRecord.of(data)
        name = f"{prefix}{key.stem}-{record.sha256[:8]}{suffix}"
        self.store.write(f"{self.artifact}/{name}", data)
        return name, record

    def finish(self, record: RecordT) -> RecordT:
        """Record a chunk after its files are written; returns the valid record.

        That is a concurrent writer's if it came first. The files that it doesn't name are then deleted.
        """
        body = self._records.dump_python(record, mode="json", by_alias=True)
        if self.store.create(f"{self.artifact}/{RECORDS}/{record.key.record_name}", seal(body)):
            return record
        theirs = self.record(record.key)
        for name in record.files.keys() - theirs.files.keys():
            self.store.delete_one(f"{self.artifact}/{name}")
        return theirs

    def read(self, record: RecordT, name: str) -> bytes:
        """One file of a finished chunk. Raises CorruptArtifact if it is missing or altered."""
        where = f"{self.url}/{name}"
        try:
            return read_verified(self.store, f"{self.artifact}/{name}", record.files[name])
        except FileNotFoundError:
            raise CorruptArtifact(f"{where}: gone", self.remake(record.key)) from None
        except CorruptArtifact as error:
            error.fix = self.remake(record.key)
            raise

    def require_complete(self, plan: PlanT, records: Collection[RecordT]) -> None:
        """Raises CorruptArtifact unless each chunk of the plan has one record, and all files in the recorded size."""
        keys = [record.key for record in records]
        if missing := set(range(len(plan.units))) - chunks_done(keys)[1]:
            unit, fix = plan.units[min(missing)].key, self.run.make(self.artifact)
            raise CorruptArtifact(f"{self.url}: {len(missing)} units have no whole record, e.g. {unit}", fix)
        twice = [stem for stem, count in Counter(key.stem for key in keys).items() if count > 1]
        if twice:
            raise CorruptArtifact(f"{self.url}: two records for chunk {twice[0]}", self.run.remake(self.artifact))
        sizes = self.store.sizes(self.artifact)
        for record in records:
            for name, file in record.files.items():
                if sizes.get(name) != file.bytes:
                    raise CorruptArtifact(f"{self.url}/{name}: gone or cut short", self.remake(record.key))

    def delete_strays(self, records: Iterable[RecordT]) -> None:
        """Delete chunk files that no record names: those of a killed process, or of a concurrent writer that lost."""
        named = {name for record in records for name in record.files}
        for name in self.store.sizes(self.artifact):
            if stem_of_file(name) and name not in named:
                self.store.delete_one(f"{self.artifact}/{name}")

    def remake(self, key: ChunkKey) -> Make:
        """The remedy for a damaged chunk: delete its record, and make what is missing."""
        return self.run.remake(self.artifact, delete=f"{self.url}/{RECORDS}/{key.record_name}")
