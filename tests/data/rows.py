"""Rows of a run made in this process, for what comes after `prepare`."""

import numpy as np
import pyarrow as pa

from ddm_ray.config import load_recipe
from ddm_ray.data.prepare.finalize import commit
from ddm_ray.data.prepare.make_rows import NETWORKS
from ddm_ray.data.prepare.records import EmbeddedRows, SourcePlan, rows_store, store_rows
from ddm_ray.data.prepare.stage import prepare
from ddm_ray.data.schema import EMBEDDING, HELDOUT, TRAIN, column, read_parquet, rows_schema
from ddm_ray.data.sharded.serial import serial
from ddm_ray.data.sources import Unit
from ddm_ray.run.chunk_records import ChunkKey
from ddm_ray.run.graph import ROWS, Artifact
from ddm_ray.run.manifest import Manifest
from ddm_ray.run.run import Run


def commit_rows(path: str, settings: tuple[str, ...] = (), chunk_rows: int = 600) -> Run:
    """A run of recipe tiny with `settings` whose rows are made of its source, in parts of `chunk_rows`."""
    run = Run.create(str(path), load_recipe("tiny", settings))
    prepare(run, chunk_rows=chunk_rows, execute=serial)
    return run


def commit_tables(run: Run, tables: list[pa.Table], artifact: Artifact = ROWS) -> Manifest:
    """Tables of `rows_schema` as the parts of a run's rows, whatever made them (known groups, a million rows)."""
    chunks, most = rows_store(run, artifact), max(table.num_rows for table in tables)
    plan = chunks.plan(lambda: SourcePlan("tables", most, None, (Unit("all", 1),), bounded=True))
    chunks.write_once(NETWORKS, ".json", lambda: (b"{}", {}))
    keys = [ChunkKey(0, number, number == len(tables) - 1) for number in range(len(tables))]
    records = [store_rows(chunks, key, EmbeddedRows(table, [])) for key, table in zip(keys, tables, strict=True)]
    return commit(chunks, plan, records)


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


def read_artifact(run: Run, artifact: Artifact, columns: list[str] | None = None) -> pa.Table:
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
