"""Rows of a run made in this process, for what comes after `prepare`."""

import numpy as np
import pyarrow as pa

from ddm_ray.config import load_recipe
from ddm_ray.data.census import commit
from ddm_ray.data.chunks import FinishChunks, fit
from ddm_ray.data.decoding import as_task, raise_failed, read_units
from ddm_ray.data.parts import Parts, Plan, list_source
from ddm_ray.data.schema import EMBEDDING, HELDOUT, TRAIN, column, read_parquet, rows_schema
from ddm_ray.data.sources import Source, Unit, open_source
from ddm_ray.data.sources.collection import Collection
from ddm_ray.storage.manifest import Manifest
from ddm_ray.storage.records import Place, chunks_done
from ddm_ray.storage.run import ROWS, Run


def commit_rows(path: str, settings: tuple[str, ...] = (), chunk_rows: int = 600) -> Run:
    """A run of recipe tiny with `settings` whose rows are made of its source, in parts of `chunk_rows`."""
    run = Run.create(str(path), load_recipe("tiny", settings))
    make_rows(run, open_source(run.config.data, chunk_rows=chunk_rows), chunk_rows)
    return run


def make_rows(run: Run, source: Source, chunk_rows: int = 600, artifact: str = ROWS) -> Manifest:
    """As `prepare`, without Ray: what an earlier one has recorded isn't made again."""
    parts = Parts(run, artifact)
    plan = parts.plan(lambda: list_source(run.config, run.config.data.source, source, chunk_rows))
    if isinstance(source, Collection):
        source = open_source(run.config.data, source.files.url, plan.chunk_rows, plan.classes)
    fit(parts, plan, source)
    done, whole = chunks_done(parts.places())
    units = [(number, unit) for number, unit in enumerate(plan.units) if number not in whole]
    missing = [as_task(number, unit, done.get(number, ())) for number, unit in units]
    if missing:
        finish = FinishChunks(run, artifact, "cpu")
        for chunk in read_units(pa.Table.from_pylist(missing), source, run.config.data):
            raise_failed(finish(chunk)["error"][0].as_py())
    return commit(parts, plan, parts.records(parts.places()))


def commit_tables(run: Run, tables: list[pa.Table], artifact: str = ROWS) -> Manifest:
    """Tables of `rows_schema` as the parts of a run's rows, whatever made them (known groups, a million rows)."""
    parts = Parts(run, artifact)
    plan = parts.plan(lambda: Plan("tables", max(table.num_rows for table in tables), None, (Unit("all", 1),)))
    for number, table in enumerate(tables):
        has = "embedding" in table.column_names
        dim = table.schema.field("embedding").type.byte_width // EMBEDDING.itemsize if has else 0
        parts.write(Place(0, number, number == len(tables) - 1), table, dim, [])
    return commit(parts, plan, parts.records(parts.places()))


def table(run: Run, *ids: str, contents: list[str] | None = None, split: str = "train") -> pa.Table:
    """Rows of recipe tiny of the given ids; equal `contents` have equal content hashes."""
    generator = np.random.default_rng(len(ids))
    hashes = [f"{int.from_bytes(content.encode()):064x}"[::-1] for content in contents or ids]
    columns = {
        "id": list(ids),
        "data": column(generator.integers(0, 256, (len(ids), 1, 8, 8), np.uint8), np.dtype("u1")),
        "label": [0] * len(ids),
        "content_hash": hashes,
        "split": [split] * len(ids),
        "embedding": column(generator.normal(size=(len(ids), 8)), EMBEDDING),
    }
    return pa.table(columns, schema=rows_schema(run.config.data, 8))


def read_artifact(run: Run, artifact: str, columns: list[str] | None = None) -> pa.Table:
    """All rows of a finished artifact of rows or shard, in the order of its files: for what is small."""
    manifest = run.require(artifact)
    names = sorted(name for name in manifest.files if name.startswith(("part-", f"{TRAIN}-", f"{HELDOUT}-")))
    tables = (
        read_parquet(run.read(artifact, name, manifest), f"{run.url}/{artifact}/{name}", columns) for name in names
    )
    return pa.concat_tables(tables)


def flip_byte(run: Run, key: str) -> None:
    """Alter one byte in the middle of an object."""
    content = bytearray(run.store.read(key))
    content[len(content) // 2] ^= 1
    run.store.write(key, bytes(content))
