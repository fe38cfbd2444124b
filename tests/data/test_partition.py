import numpy as np
import pyarrow as pa
import pytest
import safetensors.numpy

from ddm_ray.data.partition import partition
from ddm_ray.data.schema import SOURCE, images, matrix, read_artifact
from ddm_ray.data.sources import digits, png
from ddm_ray.errors import CorruptArtifact, DataError, MissingArtifact
from ddm_ray.storage.run import PARTITION, ROWS, Run, shard
from tests.data.rows import commit_rows, flip_byte

SHARDS = [shard(0), shard(1)]


@pytest.fixture(scope="module")
def parted(tmp_path_factory) -> Run:
    run = commit_rows(str(tmp_path_factory.mktemp("parted") / "run"))
    partition(run)
    return run


def contents(run: Run) -> dict[str, bytes]:
    return {key: run.store.read(f"{PARTITION}/{key}") for key in run.store.sizes(PARTITION)}


def test_every_row_is_in_the_shard_of_its_nearest_centroid(parted):
    rows = read_artifact(parted, ROWS)
    embedding_ND = matrix(rows, "embedding").astype(np.float64)
    centroids = safetensors.numpy.load(parted.read(PARTITION, "centroids.safetensors"))
    distance_NK = ((embedding_ND[:, None] - centroids["coarse_KD"]) ** 2).sum(-1)
    expected = dict(zip(rows["id"].to_pylist(), distance_NK.argmin(1), strict=True))
    found = {}
    for artifact in SHARDS:
        table = read_artifact(parted, artifact)
        assert table.column_names == ["id", "data", "label", "cluster", "split"]
        assert table["id"].to_pylist() == sorted(table["id"].to_pylist())
        found |= dict(zip(table["id"].to_pylist(), table["cluster"].to_pylist(), strict=True))
    assert len(found) == 1797
    assert found == expected
    assert centroids["fine_FD"].shape == (16, 8)
    assert set(centroids["fine_to_coarse_F"]) == {0, 1}


def test_rows_keep_their_data(parted):
    rows = read_artifact(parted, ROWS)
    shards = pa.concat_tables([read_artifact(parted, artifact) for artifact in SHARDS]).sort_by("id")
    for column in ("id", "data", "label", "split"):
        assert shards[column].combine_chunks().equals(rows[column].combine_chunks()), column


def test_the_manifests_count_the_training_rows(parted):
    info = parted.require(PARTITION).info
    counts_CK = np.zeros((10, 2), int)
    for cluster, artifact in enumerate(SHARDS):
        table = read_artifact(parted, artifact)
        train = np.array(table["split"].to_pylist()) == "train"
        np.add.at(counts_CK[:, cluster], table["label"].to_numpy()[train], 1)
        assert parted.require(artifact).info == {
            "cluster": cluster,
            "rows": table.num_rows,
            "rows_train": train.sum(),
            "data_std": pytest.approx(images(table, (1, 8, 8))[train].std(dtype=np.float64)),
        }
    assert info["counts_CK"] == counts_CK.tolist()
    assert info["rows_K"] == counts_CK.sum(0).tolist()
    assert info["num_fine"] == 16


def test_a_finished_partition_is_left_alone(parted):
    before = contents(parted)
    partition(parted, lambda *_: pytest.fail("a finished stage does nothing"))
    assert contents(parted) == before


def test_equal_rows_in_another_order_give_equal_bytes(parted, tmp_path):
    shuffled = digits().take(np.random.default_rng(1).permutation(1797))
    other = commit_rows(str(tmp_path / "other"), shuffled, parts=5)
    partition(other)
    for key, content in contents(other).items():
        if not key.endswith("_MANIFEST.json"):  # these name their input's digest, and so its files
            assert content == contents(parted)[key], key


def test_the_seed_draws_the_rows_that_are_clustered(parted, tmp_path):
    sampled = [
        commit_rows(str(tmp_path / f"{seed}{again}"), settings=("partition.sample_rows=200", f"partition.seed={seed}"))
        for seed, again in ((0, 0), (0, 1), (1, 0))
    ]
    centroids = [partition(run) and run.read(PARTITION, "centroids.safetensors") for run in sampled]
    assert centroids[0] == centroids[1]
    assert len({*centroids, parted.read(PARTITION, "centroids.safetensors")}) == 3


def test_heldout_rows_move_no_centroid(parted, tmp_path):
    rows = read_artifact(parted, ROWS)
    kept = pa.array([split == "train" for split in rows["split"].to_pylist()])
    other = commit_rows(str(tmp_path / "train"), digits().filter(kept))
    partition(other)
    assert other.read(PARTITION, "centroids.safetensors") == parted.read(PARTITION, "centroids.safetensors")


def test_what_an_interrupted_partition_left_does_not_survive(parted, tmp_path):
    run = commit_rows(str(tmp_path / "run"))

    def stop(fraction: float, note: str) -> None:
        if note == "shard 1":
            raise InterruptedError

    with pytest.raises(InterruptedError):
        partition(run, stop)
    assert run.finished(shard(0))
    assert not run.finished(PARTITION)
    flip_byte(run, f"{shard(0)}/part-0.parquet")
    partition(run)
    assert contents(run).keys() == contents(parted).keys()
    assert sum(read_artifact(run, artifact).num_rows for artifact in SHARDS) == 1797


def test_a_shard_that_was_deleted_is_made_again_alone(tmp_path):
    run = commit_rows(str(tmp_path / "run"))
    whole = partition(run)
    kept, gone = (run.manifest(artifact) for artifact in (shard(0), shard(1)))
    run.store.delete(shard(1))
    assert partition(run) == whole
    assert (run.finished(shard(0)), run.finished(shard(1))) == (kept, gone)
    assert run.read(shard(1), "part-0.parquet")


def test_damaged_rows_are_refused_by_name(tmp_path):
    run = commit_rows(str(tmp_path / "run"))
    flip_byte(run, f"{ROWS}/part-1.parquet")
    with pytest.raises(CorruptArtifact, match=f"{run.url}/rows/part-1.parquet: checksum differs"):
        partition(run)
    assert not run.store.sizes(PARTITION)


def test_a_partition_needs_rows(tmp_path):
    from ddm_ray.config import load_recipe

    run = Run.create(str(tmp_path / "run"), load_recipe("tiny"))
    with pytest.raises(MissingArtifact, match="ddm prepare"):
        partition(run)


def test_more_clusters_than_rows(tmp_path):
    table = digits().slice(0, 30)
    settings = ("partition.num_clusters=40", "partition.num_fine=40", "expert.train.global_batch=40")
    run = commit_rows(str(tmp_path / "run"), table, settings)
    num_train = read_artifact(run, ROWS)["split"].to_pylist().count("train")
    with pytest.raises(DataError) as error:
        partition(run)
    assert str(error.value) == (
        f"{run.url}: partition.num_clusters is 40, but there are only {num_train} training rows; lower it"
    )
    assert not run.store.sizes(PARTITION)


def test_an_empty_cluster_is_refused(tmp_path):
    faces = [png(np.full((8, 8), shade, np.uint8)) for shade in (0, 255)]
    ids = [f"plain/{index:02d}" for index in range(40)]
    table = pa.table([ids, [faces[index % 2] for index in range(40)], [0] * 40], schema=SOURCE)
    settings = ("partition.num_clusters=4", "partition.num_fine=8")
    run = commit_rows(str(tmp_path / "run"), table, settings)
    with pytest.raises(DataError, match=r"clusters \[.*\] have no training row.*; lower partition.num_clusters"):
        partition(run)
    assert not run.store.sizes(PARTITION)


def test_embeddings_that_are_not_finite_are_refused(tmp_path):
    from ddm_ray.data.schema import to_parquet, vectors

    run = commit_rows(str(tmp_path / "run"), parts=1)
    rows = read_artifact(run, ROWS)
    embeddings = matrix(rows, "embedding").copy()
    embeddings[7, 3] = np.nan
    column = rows.schema.get_field_index("embedding")
    run.store.delete(ROWS)
    run.store.write(f"{ROWS}/part-0.parquet", to_parquet(rows.set_column(column, "embedding", vectors(embeddings))))
    run.commit(ROWS, ["part-0.parquet"], {})
    with pytest.raises(DataError, match=r"1 embeddings aren't finite, e.g. of digits/0007; check"):
        partition(run)
