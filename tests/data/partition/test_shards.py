"""Shards: the same bytes for the same set of rows, in files and row groups of the stated sizes."""

import errno
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddm_ray.config import RunConfig, load_recipe
from ddm_ray.data import OnProgress, no_progress
from ddm_ray.data.order import shuffle_keys
from ddm_ray.data.partition import file_plan, made_files, passes
from ddm_ray.data.partition.file_plan import FilePlan
from ddm_ray.data.partition.made_files import MadeFiles
from ddm_ray.data.partition.passes import FileWork, InProcess
from ddm_ray.data.partition.shards import write_shards
from ddm_ray.data.partition.state import ExpectedShard
from ddm_ray.data.schema import EMBEDDING, HELDOUT, TEXT, TRAIN, column, images, read_parquet, rows_schema
from ddm_ray.errors import StorageError
from ddm_ray.models.null_text import NULL_TEXT
from ddm_ray.run.graph import ROWS, shard
from ddm_ray.run.manifest import NAME, Manifest, sha256
from ddm_ray.run.run import Run
from tests.infos import commit_written, info_of

pytestmark = pytest.mark.contract

EMBEDDING_DIM = 4
TEXTS = {
    "class_names": (),
    "num_classes": None,
    "channels": 2,
    "text": {"encoder": "any", "tokens": 6, "dim": 3, "pooled_dim": 5},
    "latents": {"autoencoder": "any", "scale": 1.0},
}


def made_run(folder: Path, num_clusters: int = 3, **data: object) -> Run:
    """A run with an artifact `rows` that holds the empty prompt alone: rows come from `made_rows`."""
    fields = load_recipe("tiny").model_dump(mode="json")
    fields["partition"]["num_clusters"] = num_clusters
    fields["data"] |= data
    run = Run.create(str(folder), RunConfig.model_validate(fields))
    null = {"tokens_LE": np.zeros((2, 3), np.float16), "pooled_P": np.ones(5, np.float16)}
    run.store.write(f"{ROWS}/{NULL_TEXT}", safetensors.numpy.save(null))
    commit_written(run, ROWS, [NULL_TEXT], info_of(ROWS))
    return run


def made_rows(run: Run, num_rows: int, seed: int = 0) -> pa.Table:
    data, rng = run.config.data, np.random.default_rng(seed)
    columns = {
        "id": [f"row/{number:05d}" for number in range(num_rows)],
        "content_hash": [f"{number:064x}" for number in range(num_rows)],
        "split": [HELDOUT if number % 7 == 3 else TRAIN for number in range(num_rows)],
        "embedding": column(rng.normal(size=(num_rows, EMBEDDING_DIM)), EMBEDDING),
    }
    if data.latents is None:
        columns["data"] = column(rng.integers(0, 256, (num_rows, *data.shape)), np.dtype("u1"))
    else:
        columns["data"] = column(rng.normal(size=(num_rows, *data.shape)), np.dtype("<f2"))
        columns["thumbnail"] = [b"jpeg"] * num_rows
    if data.text is None:
        columns["label"] = rng.integers(0, len(data.class_names), num_rows)
    else:
        columns["text"] = ["a caption"] * num_rows
        lengths = rng.integers(1, data.text.tokens + 1, num_rows)
        columns["text_tokens"] = [rng.bytes(int(length) * data.text.dim * TEXT.itemsize) for length in lengths]
        columns["text_pooled"] = column(rng.normal(size=(num_rows, 5)), TEXT)
    return pa.table(columns, schema=rows_schema(data, EMBEDDING_DIM))


class Parts:
    """Parts of rows that lie in memory, and the cluster of each of their rows: a reader, and what assigns its rows."""

    def __init__(self, run: Run, parts: list[tuple[pa.Table, np.ndarray]]):
        self.run, self.passes, self._parts = run, 0, parts

    def parts(self, columns: list[str] | None, on_progress: OnProgress) -> Iterator[pa.Table]:
        self.passes += 1
        for number, (table, _) in enumerate(self._parts, 1):
            yield table
            on_progress(number / len(self._parts), "rows")

    def __call__(self, table: pa.Table) -> np.ndarray:
        return next(cluster_N for each, cluster_N in self._parts if each is table)


def write(
    run: Run,
    parts: list[tuple[pa.Table, np.ndarray]],
    file_bytes: int = 4000,
    clusters: list[int] | None = None,
    made_by: type[Parts] = Parts,
) -> dict[int, Manifest]:
    num_clusters = run.config.partition.num_clusters
    counts = {split: np.zeros(num_clusters, np.int64) for split in (TRAIN, HELDOUT)}
    for table, cluster_N in parts:
        split_N = np.array(table["split"].to_pylist())
        for split, counts_K in counts.items():
            counts_K += np.bincount(cluster_N[(split_N == split) & (cluster_N >= 0)], minlength=num_clusters)
    clusters = list(range(num_clusters)) if clusters is None else clusters
    expected = {
        cluster: ExpectedShard(run, cluster, "c" * 16, run.identity(shard(cluster)), (run, ROWS))
        for cluster in clusters
    }
    for each in expected.values():
        each.invalidate()
    plan, reader = FilePlan(run.config.data, counts[TRAIN], counts[HELDOUT], clusters, file_bytes), made_by(run, parts)
    made = MadeFiles(run, expected, file_bytes)
    manifests = write_shards(FileWork(reader, reader, plan, made), expected, no_progress, InProcess())  # type: ignore[arg-type]
    made.clear()
    return manifests


def written(run: Run, cluster: int) -> dict[str, bytes]:
    return {name: run.store.read(f"{shard(cluster)}/{name}") for name in run.store.sizes(shard(cluster))}


def clusters_of(table: pa.Table) -> np.ndarray:
    """Any function of a row: cluster 0 has most rows, -1 are left out."""
    label_N = np.frombuffer(b"".join(table["content_hash"].to_pandas().str.encode("ascii")), np.uint8)
    digit_N = label_N.reshape(table.num_rows, 64)[:, -1] % 8
    return np.array([0, 0, 1, 0, 2, 0, -1, 0])[digit_N]


@pytest.mark.parametrize("data", [{}, TEXTS], ids=["pixels and classes", "latents and texts"])
def test_a_shard_holds_its_rows_and_no_others(tmp_path: Path, data: dict[str, object]) -> None:
    run = made_run(tmp_path / "run", **data)
    table = made_rows(run, 400)
    cluster_N = clusters_of(table)
    manifests = write(run, [(table, cluster_N)])
    split_N = np.array(table["split"].to_pylist())
    for cluster, manifest in manifests.items():
        assert manifest == run.finished(shard(cluster))
        for split in (TRAIN, HELDOUT):
            names = sorted(name for name in manifest.files if name.startswith(split))
            stored = pa.concat_tables(read_parquet(run.read(shard(cluster), name), name) for name in names)
            expected = table.filter(pa.array((cluster_N == cluster) & (split_N == split))).select(stored.schema.names)
            assert stored.sort_by("id").equals(expected.sort_by("id"))
            rank_N = shuffle_keys(stored["id"].to_pylist())
            assert (np.diff(rank_N.astype(object)) > 0).all()
            assert manifest.info[f"rows_{split}"] == stored.num_rows
            if split == TRAIN:
                data_NCHW = images(stored, run.config.data).astype(np.float64)
                assert manifest.info["data_std"] == pytest.approx(data_NCHW.std(), abs=1e-12)
                if "label" in stored.column_names:
                    assert manifest.info["counts_C"] == np.bincount(stored["label"], minlength=10).tolist()
                else:
                    assert manifest.info["counts_C"] == []
                    assert run.read(shard(cluster), NULL_TEXT) == run.read(ROWS, NULL_TEXT)
        assert manifest.info["rows"] == (cluster_N == cluster).sum()
        assert manifest.info["centroids"] == "c" * 16
        assert manifest.info["cluster"] == cluster


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32),
    cuts=st.lists(st.integers(0, 300), max_size=6),
    texts=st.booleans(),
    memory_bytes=st.sampled_from([1, 9000, 2**30]),
)
def test_bytes_depend_on_the_set_of_rows_alone(
    tmp_path: Path, seed: int, cuts: list[int], texts: bool, memory_bytes: int
) -> None:
    with tempfile.TemporaryDirectory(dir=tmp_path) as folder, pytest.MonkeyPatch.context() as patch:
        runs = [made_run(Path(folder) / name, **(TEXTS if texts else {})) for name in ("one", "other")]
        table = made_rows(runs[0], 300)
        write(runs[0], [(table, clusters_of(table))])
        mixed = table.take(np.random.default_rng(seed).permutation(300))
        patch.setattr(passes, "MEMORY_BYTES", memory_bytes)
        edges = [0, *sorted(cuts), 300]
        parts = [mixed.slice(start, end - start) for start, end in itertools.pairwise(edges)]
        write(runs[1], [(part, clusters_of(part)) for part in parts])
        for cluster in range(3):
            assert written(runs[0], cluster) == written(runs[1], cluster)


def test_a_file_is_a_range_of_ranks(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", num_clusters=1)
    table = made_rows(run, 500)
    row_bytes = file_plan.row_bytes(run.config.data)
    manifest = write(run, [(table, np.zeros(500, np.int64))], 40 * row_bytes)[0]
    num_files = -(-manifest.info["rows_train"] // 40)
    names = [f"{TRAIN}-{number:05d}.parquet" for number in range(num_files)]
    assert [name for name in sorted(manifest.files) if name.startswith(TRAIN)] == names
    for number, name in enumerate(names):
        for rank in shuffle_keys(read_parquet(run.read(shard(0), name), name)["id"].to_pylist()):
            assert int(rank) * num_files // 2**64 == number


def test_data_std_is_the_same_in_one_file_and_in_many(tmp_path: Path) -> None:
    runs = {size: made_run(tmp_path / str(size), **TEXTS) for size in (2000, 2**28)}
    manifests = []
    for size, run in runs.items():
        table = made_rows(run, 300)
        manifests.append(write(run, [(table, clusters_of(table))], size)[0])
    assert len(manifests[0].files) > 10 > len(manifests[1].files)
    assert manifests[0].info["data_std"] == manifests[1].info["data_std"]


@pytest.mark.parametrize(("size", "rows"), [(8, 8192), (32, 1024), (400, 16)])
def test_row_groups_are_of_4_mib(tmp_path: Path, size: int, rows: int) -> None:
    run = made_run(tmp_path / "run", num_clusters=1, image_size=size, channels=3 if size > 8 else 1)
    num_rows = 20_000 if size <= 8 else rows * 2 + 5
    table = pa.table(
        {
            "id": [str(number) for number in range(num_rows)],
            "data": column(np.zeros((num_rows, *run.config.data.shape)), np.dtype("u1")),
            "label": np.zeros(num_rows, np.int64),
            "content_hash": [""] * num_rows,
            "split": [TRAIN] * num_rows,
        },
        schema=rows_schema(run.config.data, 0),
    )
    write(run, [(table, np.zeros(num_rows, np.int64))], file_plan.FILE_BYTES)
    file = pq.ParquetFile(pa.BufferReader(run.read(shard(0), f"{TRAIN}-00000.parquet")))
    groups = [file.metadata.row_group(group) for group in range(file.num_row_groups)]
    assert [group.num_rows for group in groups[:-1]] == [rows] * (len(groups) - 1)
    assert len(groups) == -(-num_rows // rows)
    if 16 < rows < 8192:
        assert 2 * 2**20 < groups[0].total_byte_size <= 4.1 * 2**20


def test_a_cluster_without_heldout_rows_has_no_heldout_file(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", num_clusters=1)
    table = made_rows(run, 50)
    table = table.filter(pa.array(np.array(table["split"].to_pylist()) == TRAIN))
    manifest = write(run, [(table, np.zeros(table.num_rows, np.int64))], 2**20)[0]
    assert list(manifest.files) == [f"{TRAIN}-00000.parquet"]
    assert manifest.info["rows_heldout"] == 0


def test_what_an_earlier_partition_left_is_gone(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    table = made_rows(run, 300)
    write(run, [(table, clusters_of(table))], 1000)
    many = set(written(run, 0))
    for cluster in range(3):
        run.store.delete_one(f"{shard(cluster)}/{NAME}")
    write(run, [(table, clusters_of(table))], 2**20)
    assert len(many) > 10
    assert set(written(run, 0)) == {f"{TRAIN}-00000.parquet", f"{HELDOUT}-00000.parquet", NAME}
    for name, record in run.require(shard(0)).files.items():
        assert sha256(run.store.read(f"{shard(0)}/{name}")) == record.sha256


def test_a_shard_that_a_rival_finished_is_taken_as_it_is(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    table = made_rows(run, 300)
    theirs = write(run, [(table, clusters_of(table))], 1000)
    inodes = {path: path.stat().st_ino for path in Path(run.url, shard(0)).iterdir()}
    assert write(run, [(table, clusters_of(table))], 2**20) == theirs
    assert {path: path.stat().st_ino for path in Path(run.url, shard(0)).iterdir()} == inodes


def test_rows_of_a_few_files_are_held_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made_run(tmp_path / "run", num_clusters=1, image_size=64, channels=3)
    table, file_bytes = made_rows(run, 200), 4 * 2**20
    parts = []
    for part in range(20):
        ids = pa.array([f"{part}/{number}" for number in range(200)])
        parts.append((table.set_column(0, "id", ids), np.zeros(200, np.int64)))
    before, most, readers = pa.total_allocated_bytes(), [0], []

    class Watched(Parts):
        def parts(self, columns: list[str] | None, on_progress: OnProgress) -> Iterator[pa.Table]:
            readers.append(self)
            for each in super().parts(columns, on_progress):
                most.append(pa.total_allocated_bytes() - before)
                yield each

    monkeypatch.setattr(passes, "MEMORY_BYTES", 2 * file_bytes)
    write(run, parts, file_bytes, made_by=Watched)
    total = 20 * table.nbytes
    assert total // (2 * file_bytes) <= len(readers) == readers[0].passes <= total // file_bytes
    assert max(most) < 2.5 * file_bytes < total / 4


def test_a_full_disk_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    run = made_run(tmp_path / "run", num_clusters=1)
    monkeypatch.setattr(made_files, "write_rows", full)
    line = f"^{tempfile.gettempdir()}: No space left on device; make room there, or name another folder by TMPDIR$"
    with pytest.raises(StorageError, match=line):
        write(run, [(made_rows(run, 40), np.zeros(40, np.int64))], 2**20)
    assert not run.store.sizes(shard(0))
