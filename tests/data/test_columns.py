"""Columns of a part of rows that are read by themselves: how many bytes that takes, and what is found out."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ddm_ray.config import load_recipe
from ddm_ray.data.columns import FOOTER_BYTES, WHOLE_BYTES, read_columns
from ddm_ray.data.order import holdout_fractions
from ddm_ray.data.partition.clustering import COLUMNS, RowsReader
from ddm_ray.data.partition.stage import partition
from ddm_ray.data.schema import EMBEDDING, HELDOUT, TRAIN, column, rows_schema
from ddm_ray.errors import CorruptArtifact
from ddm_ray.run.graph import CENTROIDS, PARTITION, ROWS, shard
from ddm_ray.run.manifest import FileRecord, Manifest
from ddm_ray.run.run import Run
from tests.data.rows import commit_tables
from tests.store_meter import StoreMeter

DIM, ROWS_OF_PART, PARTS = 384, 300, 3
LATENTS = ("data.image_size=32", "data.channels=4", "data.latents={autoencoder: none, scale: 1.0}")


def run_of_large_rows(url: str, *settings: str) -> Run:
    """Rows of about 10 KB, embeddings 1.5 KB of them: in parts that are more than is read whole."""
    run = Run.create(url, load_recipe("tiny", (*LATENTS, "partition.num_fine=8", *settings)))
    generator = np.random.default_rng(0)
    tables = []
    for part in range(PARTS):
        ids = [f"{part}/{row}" for row in range(ROWS_OF_PART)]
        held_N = holdout_fractions(ids) < run.config.data.heldout
        columns = {
            "id": ids,
            "data": column(generator.standard_normal((ROWS_OF_PART, 4, 32, 32)), np.dtype("<f2")),
            "label": generator.integers(0, 10, ROWS_OF_PART),
            "content_hash": [f"{part:032x}{row:032x}" for row in range(ROWS_OF_PART)],
            "split": [HELDOUT if held else TRAIN for held in held_N],
            "embedding": column(generator.standard_normal((ROWS_OF_PART, DIM)), EMBEDDING),
            "thumbnail": [b"jpeg" * 100] * ROWS_OF_PART,
        }
        tables.append(pa.table(columns, schema=rows_schema(run.config.data, DIM)))
    commit_tables(run, tables)
    return run


def read_of(run: Run, work: Callable[[], object]) -> int:
    """Bytes that some work reads of a run's storage."""
    with pytest.MonkeyPatch.context() as patch:
        meter = StoreMeter(patch)
        work()
    return meter.read


def rows_bytes(run: Run) -> int:
    return sum(record.bytes for record in run.require(ROWS).files.values())


@pytest.mark.parametrize(("place", "method"), [("disk", "embeddings"), ("memory", "label"), ("memory", "random")])
def test_a_pass_reads_the_columns_that_it_needs(place: str, method: str, tmp_path: Path) -> None:
    settings = (f"partition.method={method}",)
    run = run_of_large_rows(str(tmp_path) if place == "disk" else f"memory:///{tmp_path.name}{method}", *settings)
    reader, columns = RowsReader(run, ROWS), COLUMNS.get(method, [])
    own = EMBEDDING.itemsize * DIM if method == "embeddings" else 0
    tables: list[pa.Table] = []

    most = PARTS * (FOOTER_BYTES + ROWS_OF_PART * (own + 100))
    assert most < 0.4 * rows_bytes(run)
    assert read_of(run, lambda: tables.extend(reader.parts(columns, lambda *_: None))) < most
    for table, complete in zip(tables, reader.parts(None, lambda *_: None), strict=True):
        assert table.equals(complete.select(table.column_names))


def test_a_partition_reads_the_rows_once_and_twice_what_it_clusters(tmp_path: Path) -> None:
    run = run_of_large_rows(str(tmp_path))
    twice = 2 * PARTS * (FOOTER_BYTES + ROWS_OF_PART * (EMBEDDING.itemsize * DIM + 100))
    read = read_of(run, lambda: partition(run, with_report=False))
    assert rows_bytes(run) < read < rows_bytes(run) + twice + 100_000  # of manifests


def damaged(run: Run, of_column: str) -> str:
    """Flip a byte in the middle of a column of one part; its name."""
    name = sorted(name for name in run.require(ROWS).files if name.startswith("part-"))[1]
    path = Path(run.url, ROWS, name)
    metadata = pq.read_metadata(path).row_group(0)
    [at] = [
        chunk.data_page_offset + chunk.total_compressed_size // 2
        for chunk in map(metadata.column, range(metadata.num_columns))
        if chunk.path_in_schema == of_column
    ]
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    return name


@pytest.mark.parametrize("of_column", ["id", "embedding"])
def test_a_damaged_column_is_found_by_the_pass_that_reads_it(of_column: str, tmp_path: Path) -> None:
    run = run_of_large_rows(str(tmp_path / "run"))
    name = damaged(run, of_column)
    with pytest.raises(CorruptArtifact, match=f"^{run.url}/rows/{name}: checksum differs"):
        partition(run, with_report=False)
    assert not run.store.sizes(PARTITION)


@pytest.mark.parametrize("of_column", ["data", "label"])
def test_damage_elsewhere_is_found_before_a_shard_is_written(of_column: str, tmp_path: Path) -> None:
    complete, run = (run_of_large_rows(str(tmp_path / name)) for name in ("whole", "run"))
    name = damaged(run, of_column)
    with pytest.raises(CorruptArtifact, match=f"^{run.url}/rows/{name}: checksum differs"):
        partition(run, with_report=False)
    # The centroids are those of the rows as they were, and stay.
    assert all(key.startswith("centroids/") for key in run.store.sizes(PARTITION))
    partition(complete, with_report=False)
    assert run.require(CENTROIDS).files == complete.require(CENTROIDS).files
    Path(run.url, ROWS, name).write_bytes(Path(complete.url, ROWS, name).read_bytes())
    partition(run, with_report=False)
    assert run.require(shard(0)).files == complete.require(shard(0)).files


@pytest.mark.parametrize("wrong", ["no checksums", "cut short", "no footer"])
def test_a_file_that_cannot_be_read_by_columns_is_read_whole(wrong: str, tmp_path: Path) -> None:
    """Of one that an older version wrote, or that is damaged, the whole checksum decides."""
    run = run_of_large_rows(str(tmp_path))
    manifest = run.require(ROWS)
    name = next(name for name in manifest.files if name.startswith("part-"))
    path = tmp_path / ROWS / name
    complete, data = pq.read_table(path), path.read_bytes()
    if wrong == "no checksums":
        pq.write_table(complete, path, compression="none", use_dictionary=False)
        files = {**manifest.files, name: FileRecord.of_file(path)}
        manifest = Manifest(manifest.artifact, manifest.identity, files, manifest.info, manifest.content)
        assert read_of(run, lambda: read_columns(run, ROWS, name, manifest, ["id"])) > manifest.files[name].bytes
        assert read_columns(run, ROWS, name, manifest, ["id"]).equals(complete.select(["id"]))
        return
    path.write_bytes(data[: WHOLE_BYTES + 7] if wrong == "cut short" else data[:-9] + bytes(9))
    with pytest.raises(CorruptArtifact, match=f"^{run.url}/rows/{name}: "):
        read_columns(run, ROWS, name, manifest, ["id"])
