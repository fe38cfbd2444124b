"""The last step of `prepare`: ids are unique, equal images are counted or dropped; then the manifest."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from ddm_ray.data.prepare.make_rows import NULL, networks_of
from ddm_ray.data.prepare.records import REJECTED, RowsRecord, RowsStore, SourcePlan, read_rows
from ddm_ray.data.read_ahead import read_ahead
from ddm_ray.data.reasons import commonest
from ddm_ray.data.schema import DUPLICATES, TRAIN, to_parquet
from ddm_ray.errors import DataError
from ddm_ray.remedies import Give
from ddm_ray.storage.info import Reason, RowsInfo
from ddm_ray.storage.listing import named_or_listed
from ddm_ray.storage.manifest import FileRecord, Manifest, canonical, sha256
from ddm_ray.storage.versions import versions

EXAMPLES = 3
PREFETCH_PARTS = 4


def check_rejected(
    chunks: RowsStore,
    plan: SourcePlan,
    records: Sequence[RowsRecord],
    max_rejected: float,
    expected: float | None = None,
) -> None:
    """Raise DataError if more than the share `max_rejected` of the rows was rejected, with examples and what to do.

    `expected`: about how many rows there will be, while the source is still read.
    """
    rejected = sum(record.rejected for record in records)
    num_read = rejected + sum(record.rows for record in records)
    if rejected <= max_rejected * (num_read if expected is None else expected):
        return
    share = rejected / num_read
    if expected is None:
        rows, bound = f"{num_read} rows", f"{share:.1%} where {max_rejected:.1%} are allowed"
    else:
        rows = f"the first {num_read} rows read"
        bound = f"more than the {max_rejected:.1%} that are allowed of about {expected:.0f}"
    examples = "; ".join(f"{reason.reason}, e.g. {reason.id}" for reason in _reasons(records)[:EXAMPLES])
    advice = f"mend them and delete {chunks.url}, or go on"
    raise DataError(
        f"source {plan.source}: {rejected} of {rows} can't be used, {bound}: {examples}; reasons are in"
        f" {chunks.url}/{REJECTED}",
        Give("max_rejected", advice, f"{min(1.0, np.ceil(share * 100) / 100):g}"),
    )


def commit(
    chunks: RowsStore, plan: SourcePlan, records: Sequence[RowsRecord], earlier: Sequence[RowsStore] = ()
) -> Manifest:
    """Check the records of all chunks against each other, `earlier` rows and storage, and commit the rows.

    Chunk files that no record names, of a kill or a concurrent writer that came second, are deleted. Raises DataError
    if an id comes twice or there is no row to train on; CorruptArtifact.
    """
    run, artifact = chunks.run, chunks.artifact
    identity = run.identity(artifact)
    chunks.require_complete(plan, records)
    every = [_Chunk(rows, record) for rows in earlier for record in rows.records(rows.finished_keys())]
    every += [_Chunk(chunks, record) for record in records]
    _require_unique(plan, every)
    equal = _equal_images(every, chunks)
    dropped = equal.ids if run.config.data.duplicates == "drop" else []
    heldout = sum(record.heldout for record in records) - (equal.heldout if dropped else 0)
    num_rows = sum(record.rows for record in records) - len(dropped)
    if num_rows == heldout and not (earlier and num_rows):
        raise DataError(
            f"source {plan.source} gave no row to train on: {num_rows} can be used and data.heldout is"
            f" {run.config.data.heldout}; reasons for others are in {chunks.url}/{REJECTED}"
        )
    others: dict[str, FileRecord] = {}
    content = [record.digest for record in records if record.digest]
    if run.config.data.text is not None:
        from ddm_ray.models.null_text import NULL_TEXT  # torch, which other runs do without

        null, _ = chunks.read_once(NULL)
        chunks.store.write(f"{artifact}/{NULL_TEXT}", null)
        others[NULL_TEXT] = FileRecord.of(null)
        content.append(others[NULL_TEXT].sha256)
    if run.config.data.duplicates == "drop":
        data = to_parquet(pa.table({"id": pa.array(dropped, pa.string())}))
        chunks.store.write(f"{artifact}/{DUPLICATES}", data)
        others[DUPLICATES] = FileRecord.of(data)
    info = RowsInfo(
        rows=num_rows,
        rows_train=num_rows - heldout,
        rows_heldout=heldout,
        rejected=sum(record.rejected for record in records),
        duplicates=len(equal.ids),
        dropped=len(dropped),
        embedding_dim=max(record.embedding_dim for record in records),
        source=plan.source,
        classes=plan.classes,
        ignored=plan.ignored,
        reasons=_reasons(records),
        networks=networks_of(chunks, plan),
        versions=versions(),
    )
    files = named_or_listed(chunks.store, artifact, (record.part for record in records if record.part), others)
    manifest = run.commit_records(artifact, files, info, sha256(canonical(content)), identity)
    chunks.delete_strays(records)
    return manifest


def _reasons(records: Sequence[RowsRecord]) -> tuple[Reason, ...]:
    return tuple(Reason(**row) for row in commonest(reason for record in records for reason in record.commonest))


@dataclass(frozen=True)
class _Chunk:
    """A finished chunk, of these rows or of earlier ones."""

    rows: RowsStore
    record: RowsRecord


def _require_unique(plan: SourcePlan, every: Sequence[_Chunk]) -> None:
    suspects = _sharing(every, [chunk.record.id_hashes_N for chunk in every])
    ids = [row_id for rows in _read(suspects, ["id"]) for row_id in rows["id"].to_pylist()]
    twice = [row_id for row_id, count in Counter(ids).items() if count > 1]
    if twice:
        raise DataError(f"source {plan.source}: {len(twice)} ids come twice, e.g. {twice[0]}; give each row its own")


@dataclass(frozen=True)
class _Equal:
    """Rows whose image equals an earlier row's, byte by byte: their ids, and how many of them are held out."""

    ids: list[str]
    heldout: int


def _equal_images(every: Sequence[_Chunk], own: RowsStore) -> _Equal:
    """Equal images among `own` rows, which come last."""
    ids: list[str] = []
    heldout = 0
    earlier: set[str] = set()
    suspects = _sharing(every, [chunk.record.content_hashes_N for chunk in every])
    tables = _read(suspects, ["id", "content_hash", "split"])
    for rows, table in zip((suspect.chunk.rows for suspect in suspects), tables, strict=True):
        for row_id, content, split in zip(*(column.to_pylist() for column in table.columns), strict=True):
            if content in earlier and rows is own:
                ids.append(row_id)
                heldout += split != TRAIN
            earlier.add(content)
    return _Equal(ids, heldout)


@dataclass(frozen=True)
class _Suspects:
    """The rows of a part whose hash comes more than once; they are few, and no others are read."""

    chunk: _Chunk
    rows_N: np.ndarray


def _sharing(every: Sequence[_Chunk], hashes: list[np.ndarray]) -> list[_Suspects]:
    """The rows with a hash that comes more than once, in order."""
    every_N = np.concatenate([*hashes, np.empty(0, np.uint64)])
    every_N.sort()  # in place, and looked up in below: of a hundred million rows each copy is .8 GB
    twice = np.unique(every_N[1:][every_N[1:] == every_N[:-1]])
    del every_N
    suspects = (_Suspects(chunk, _among(own, twice)) for chunk, own in zip(every, hashes, strict=True))
    return [own for own in suspects if own.rows_N.any()]


def _among(values_N: np.ndarray, ordered: np.ndarray) -> np.ndarray:
    """True for values among the ordered ones; numpy's own `isin` would order these anew for each part."""
    if not len(ordered):
        return np.zeros(len(values_N), bool)
    among_N: np.ndarray = ordered[np.searchsorted(ordered, values_N).clip(max=len(ordered) - 1)] == values_N
    return among_N


def _read(suspects: list[_Suspects], columns: list[str]) -> Iterator[pa.Table]:
    def read(own: _Suspects) -> pa.Table:
        return read_rows(own.chunk.rows, own.chunk.record, columns)

    for own, table in zip(suspects, read_ahead(read, suspects, PREFETCH_PARTS), strict=True):
        yield table.filter(pa.array(own.rows_N))
