"""The last step of `prepare`: checks that ids are unique, counts or drops equal images, and commits the manifest."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from ddm_ray.data.prepare.make_rows import NULL, networks_of
from ddm_ray.data.prepare.records import REJECTED, RowsRecord, RowsStore, SourcePlan, read_rows
from ddm_ray.data.prepare.repeated import values_that_repeat
from ddm_ray.data.read_ahead import read_ahead
from ddm_ray.data.reasons import commonest
from ddm_ray.data.schema import DUPLICATES, TRAIN, to_parquet
from ddm_ray.data.sharded.kept_records import KeptRecords
from ddm_ray.data.sources.named import named_source
from ddm_ray.errors import DataError
from ddm_ray.jobs.versions import installed_versions
from ddm_ray.remedies import Give
from ddm_ray.run.info import Reason, RowsInfo
from ddm_ray.run.listing import named_or_listed
from ddm_ray.run.manifest import FileRecord, Manifest
from ddm_ray.spelling import shell_line
from ddm_ray.store.checksummed import digest_of_list

EXAMPLES = 3
PREFETCH_PARTS = 4


def check_rejected(
    chunks: RowsStore,
    plan: SourcePlan,
    records: Collection[RowsRecord],
    max_rejected: float,
    expected: float | None = None,
) -> None:
    """Raise DataError, with examples and a remedy, if more than the share `max_rejected` of the rows was rejected.

    `expected`: the approximate number of rows in total, while the source is still being read.
    """
    rejected, num_read = 0, 0
    for record in records:
        rejected += record.rejected
        num_read += record.rows + record.rejected
    if rejected <= max_rejected * (num_read if expected is None else expected):
        return
    share = rejected / num_read
    if expected is None:
        rows, bound = f"{num_read} rows", f"{share:.1%} where {max_rejected:.1%} are allowed"
    else:
        rows = f"the first {num_read} rows read"
        bound = f"more than the {max_rejected:.1%} that are allowed of about {expected:.0f}"
    reasons = _commonest(record.commonest for record in records)
    examples = "; ".join(f"{reason.reason}, e.g. {reason.id}" for reason in reasons[:EXAMPLES])
    advice = f"mend them and delete {shell_line(chunks.url)}, or go on"
    raise DataError(
        f"source {plan.source}: {rejected} of {rows} can't be used, {bound}: {examples}; reasons are in"
        f" {chunks.url}/{REJECTED}",
        Give("max_rejected", advice, f"{min(1.0, np.ceil(share * 100) / 100):g}"),
    )


def commit(
    chunks: RowsStore, plan: SourcePlan, records: Collection[RowsRecord], earlier: Sequence[RowsStore] = ()
) -> Manifest:
    """Check the records of all chunks against each other and `earlier` rows, and commit the rows.

    Deletes chunk files that no record names: those of a killed process, or of a concurrent writer that lost. Raises
    DataError if an id occurs twice, or there is no row to train on; CorruptArtifact.
    """
    run, artifact = chunks.run, chunks.artifact
    identity = run.identity(artifact)
    every = _Every([*((rows, KeptRecords.of(rows)) for rows in earlier), (chunks, records)])
    _require_unique(plan, every)
    equal = _equal_images(every, chunks)
    dropped = equal.ids if run.config.data.duplicates == "drop" else []
    heldout, num_rows, rejected, embedding_dim = -equal.heldout if dropped else 0, -len(dropped), 0, 0
    for record in records:
        heldout, num_rows = heldout + record.heldout, num_rows + record.rows
        rejected, embedding_dim = rejected + record.rejected, max(embedding_dim, record.embedding_dim)
    if num_rows == heldout and not (earlier and num_rows):
        raise DataError(
            f"source {plan.source} gave no row to train on: {num_rows} can be used and data.heldout is"
            f" {run.config.data.heldout}; reasons for others are in {chunks.url}/{REJECTED}"
        )
    others: dict[str, FileRecord] = {}
    extra = list[str]()
    if run.config.data.text is not None:
        from ddm_ray.models.null_text import NULL_TEXT  # imports torch, which other runs don't need

        null, _ = chunks.read_once(NULL)
        chunks.store.write(f"{artifact}/{NULL_TEXT}", null)
        others[NULL_TEXT] = FileRecord.of(null)
        extra.append(others[NULL_TEXT].sha256)
    if run.config.data.duplicates == "drop":
        data = to_parquet(pa.table({"id": pa.array(dropped, pa.string())}))
        chunks.store.write(f"{artifact}/{DUPLICATES}", data)
        others[DUPLICATES] = FileRecord.of(data)
    named = named_source(plan.source)
    info = RowsInfo(
        rows=num_rows,
        rows_train=num_rows - heldout,
        rows_heldout=heldout,
        rejected=rejected,
        duplicates=len(equal.ids),
        dropped=len(dropped),
        embedding_dim=embedding_dim,
        source=plan.source,
        classes=plan.classes,
        ignored=plan.ignored,
        reasons=_commonest(record.commonest for record in records),
        networks=networks_of(chunks),
        versions=installed_versions(),
        credit=named.credit if named else None,
        losses=_commonest(record.losses for record in records),
    )
    files = named_or_listed(chunks.store, artifact, (record.part for record in records if record.part), others)
    digests = chain((record.digest for record in records if record.digest), extra)
    manifest = run.commit_records(artifact, files, info, digest_of_list(digests), identity)
    chunks.delete_strays(records)
    return manifest


def _commonest(of_chunks: Iterable[list[dict[str, Any]]]) -> tuple[Reason, ...]:
    """The most common reasons of all chunks, given those of each."""
    return tuple(Reason(**row) for row in commonest(chain.from_iterable(of_chunks)))


@dataclass(frozen=True)
class _Chunk:
    """A finished chunk of these rows, or of earlier ones."""

    rows: RowsStore
    record: RowsRecord


@dataclass(frozen=True)
class _Every:
    """All finished chunks, those of earlier rows first; can be iterated repeatedly."""

    parts: Sequence[tuple[RowsStore, Collection[RowsRecord]]]

    def __iter__(self) -> Iterator[_Chunk]:
        return (_Chunk(rows, record) for rows, records in self.parts for record in records)


def _require_unique(plan: SourcePlan, every: Iterable[_Chunk]) -> None:
    suspects = _sharing(every, lambda chunk: chunk.record.id_hashes_N)
    ids = [row_id for _, rows in _read(suspects, ["id"]) for row_id in rows["id"].to_pylist()]
    twice = [row_id for row_id, count in Counter(ids).items() if count > 1]
    if twice:
        raise DataError(f"source {plan.source}: {len(twice)} ids come twice, e.g. {twice[0]}; give each row its own")


@dataclass(frozen=True)
class _Equal:
    """Rows with the same image file as an earlier row: their ids, and how many of them are held out."""

    ids: list[str]
    heldout: int


def _equal_images(every: Iterable[_Chunk], own: RowsStore) -> _Equal:
    """Equal images among the `own` rows, which come last."""
    ids: list[str] = []
    heldout = 0
    earlier: set[bytes] = set()
    suspects = _sharing(every, lambda chunk: chunk.record.content_hashes_N)
    for rows, table in _read(suspects, ["id", "content_hash", "split"]):
        for row_id, content, split in zip(*(column.to_pylist() for column in table.columns), strict=True):
            image = bytes.fromhex(content)
            if image in earlier and rows is own:
                ids.append(row_id)
                heldout += split != TRAIN
            earlier.add(image)
    return _Equal(ids, heldout)


@dataclass(frozen=True)
class _Suspects:
    """The rows of a part with a hash that occurs more than once. They are few, and no others are read."""

    chunk: _Chunk
    rows_N: np.ndarray


def _sharing(every: Iterable[_Chunk], hashes: Callable[[_Chunk], np.ndarray]) -> Iterator[_Suspects]:
    """Yield the rows with a hash that occurs more than once, in order. Iterates twice over `every`."""
    twice = values_that_repeat(map(hashes, every))
    for chunk in every if len(twice) else ():
        rows_N = _among(hashes(chunk), twice)
        if rows_N.any():
            yield _Suspects(chunk, rows_N)


def _among(values_N: np.ndarray, ordered: np.ndarray) -> np.ndarray:
    """True for values among the ordered ones, at least one; numpy's `isin` would sort these in every call."""
    among_N: np.ndarray = ordered[np.searchsorted(ordered, values_N).clip(max=len(ordered) - 1)] == values_N
    return among_N


def _read(suspects: Iterable[_Suspects], columns: list[str]) -> Iterator[tuple[RowsStore, pa.Table]]:
    """Yield some columns of the rows, part by part, each with the rows' store."""

    def read(own: _Suspects) -> tuple[RowsStore, pa.Table]:
        table = read_rows(own.chunk.rows, own.chunk.record, columns)
        return own.chunk.rows, table.filter(pa.array(own.rows_N))

    return read_ahead(read, suspects, PREFETCH_PARTS)
