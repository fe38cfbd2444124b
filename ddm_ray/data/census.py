"""The last step of `prepare`: all chunks are there, every id is once, equal images are counted; then the manifest."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from ddm_ray.data.parts import NULL, REJECTED, Parts, Plan, Record
from ddm_ray.data.reasons import commonest
from ddm_ray.data.schema import DUPLICATES, TRAIN, to_parquet
from ddm_ray.data.texts import NULL_TEXT
from ddm_ray.errors import CorruptArtifact, DataError
from ddm_ray.storage.manifest import FileRecord, Manifest, canonical, sha256
from ddm_ray.storage.records import chunks_done

EXAMPLES = 3
ENOUGH_SEEN = 1000


def check_rejected(parts: Parts, plan: Plan, records: list[Record], most: float, total: float | None = None) -> None:
    """DataError if more than the share `most` of the rows was rejected, with examples and what to do.

    `total`: about how many rows there will be, while the source is still read.
    """
    rejected = sum(record.rejected for record in records)
    seen = rejected + sum(record.rows for record in records)
    if rejected <= most * (seen if total is None else total):
        return
    rows = f"{seen} rows" if total is None else f"the first {seen} rows read"
    share = rejected / seen
    told = f"{share:.1%} where {most:.1%} are allowed"
    if total is not None:
        told = f"more than the {most:.1%} that are allowed of about {total:.0f}"
    such = "; ".join(f"{reason['reason']}, e.g. {reason['id']}" for reason in _reasons(records)[:EXAMPLES])
    raise DataError(
        f"source {plan.source}: {rejected} of {rows} can't be used, {told}: {such}; reasons are in"
        f" {parts.url}/{REJECTED}; mend them and delete {parts.url}, or go on with"
        f" --max-rejected {min(1.0, np.ceil(share * 100) / 100):g}"
    )


def commit(parts: Parts, plan: Plan, records: list[Record]) -> Manifest:
    """Check the records of all chunks against each other and storage, and commit the rows.

    Files that no record names, of a kill or a rival that was second, are deleted. Raises DataError if an id comes
    twice or there is no row to train on; CorruptArtifact.
    """
    run, artifact = parts.run, parts.artifact
    identity = run.identity(artifact)
    records = sorted(records, key=lambda record: record.place)
    _require_whole(parts, plan, records)
    _require_unique(parts, plan, records)
    equal = _equal_images(parts, records)
    dropped = equal.ids if run.config.data.duplicates == "drop" else []
    heldout = sum(record.heldout for record in records) - (equal.heldout if dropped else 0)
    num_rows = sum(record.rows for record in records) - len(dropped)
    if num_rows == heldout:
        raise DataError(
            f"source {plan.source} gave no row to train on: {num_rows} can be used and data.heldout is"
            f" {run.config.data.heldout}; reasons for others are in {parts.url}/{REJECTED}"
        )
    files = dict(record.part for record in records if record.part)
    content = [record.digest for record in records if record.digest]
    if run.config.data.text is not None:
        null = parts.settled(NULL, ".safetensors")
        parts.store.write(f"{artifact}/{NULL_TEXT}", null)
        files[NULL_TEXT] = FileRecord.of(null)
        content.append(files[NULL_TEXT].sha256)
    if run.config.data.duplicates == "drop":
        data = to_parquet(pa.table({"id": pa.array(dropped, pa.string())}))
        parts.store.write(f"{artifact}/{DUPLICATES}", data)
        files[DUPLICATES] = FileRecord.of(data)
    info: dict[str, Any] = {
        "rows": num_rows,
        "rows_train": num_rows - heldout,
        "rows_heldout": heldout,
        "rejected": sum(record.rejected for record in records),
        "duplicates": len(equal.ids),
        "dropped": len(dropped),
        "embedding_dim": max(record.embedding_dim for record in records),
        "source": plan.source,
        "classes": plan.classes and list(plan.classes),
        "ignored": plan.ignored,
        "reasons": _reasons(records),
    }
    manifest = run.commit_records(artifact, files, info, sha256(canonical(content)), identity)
    named = {name for record in records for name in record.files}
    for name in parts.store.sizes(artifact):
        if name.startswith(("part-", f"{REJECTED}/")) and name not in named:
            parts.store.delete_one(f"{artifact}/{name}")
    return manifest


def _reasons(records: list[Record]) -> list[dict[str, Any]]:
    return commonest(reason for record in records for reason in record.commonest)


def _require_whole(parts: Parts, plan: Plan, records: list[Record]) -> None:
    places = [record.place for record in records]
    again = f"run it again: {parts.run.command(parts.artifact)}"
    if missing := set(range(len(plan.units))) - chunks_done(places)[1]:
        unit = plan.units[min(missing)].key
        raise CorruptArtifact(f"{parts.url}: {len(missing)} units have no whole record, e.g. {unit}; {again}")
    twice = [stem for stem, count in Counter(place.stem for place in places).items() if count > 1]
    if twice:
        raise CorruptArtifact(f"{parts.url}: two records for chunk {twice[0]}; {parts.run.anew(parts.artifact)}")
    sizes = parts.store.sizes(parts.artifact)
    for record in records:
        for name, file in record.files.items():
            if sizes.get(name) != file.bytes:
                raise CorruptArtifact(f"{parts.url}/{name}: gone or cut short; {parts.redo(record)}")


def _require_unique(parts: Parts, plan: Plan, records: list[Record]) -> None:
    suspects = _sharing(records, [record.id_hashes_N for record in records])
    ids = [row_id for rows in _read(parts, suspects, ["id"]) for row_id in rows["id"].to_pylist()]
    twice = [row_id for row_id, count in Counter(ids).items() if count > 1]
    if twice:
        raise DataError(f"source {plan.source}: {len(twice)} ids come twice, e.g. {twice[0]}; give each row its own")


@dataclass(frozen=True)
class _Equal:
    """Rows whose image came before, byte by byte: their ids, and how many of them are held out."""

    ids: list[str]
    heldout: int


def _equal_images(parts: Parts, records: list[Record]) -> _Equal:
    ids: list[str] = []
    heldout = 0
    seen: set[str] = set()
    suspects = _sharing(records, [record.content_hashes_N for record in records])
    for table in _read(parts, suspects, ["id", "content_hash", "split"]):
        for row_id, content, split in zip(*(column.to_pylist() for column in table.columns), strict=True):
            if content in seen:
                ids.append(row_id)
                heldout += split != TRAIN
            seen.add(content)
    return _Equal(ids, heldout)


@dataclass(frozen=True)
class _Suspects:
    """Those rows of a part whose hash comes more than once; only they are looked at, for they are few."""

    record: Record
    rows_N: np.ndarray


def _sharing(records: list[Record], hashes: list[np.ndarray]) -> list[_Suspects]:
    """The rows with a hash that comes more than once, in order."""
    values, counts = np.unique(np.concatenate([*hashes, np.empty(0, np.uint64)]), return_counts=True)
    twice = values[counts > 1]
    found = (_Suspects(record, np.isin(own, twice)) for record, own in zip(records, hashes, strict=True))
    return [suspects for suspects in found if suspects.rows_N.any()]


def _read(parts: Parts, suspects: list[_Suspects], columns: list[str]) -> Iterator[pa.Table]:
    tables = parts.read_parts((own.record for own in suspects), columns)
    for own, table in zip(suspects, tables, strict=True):
        yield table.filter(pa.array(own.rows_N))
