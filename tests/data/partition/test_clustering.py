import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sklearn.metrics import adjusted_rand_score

from ddm_ray.core.balance import capacity
from ddm_ray.data.order import shuffle_keys
from ddm_ray.data.partition.assignment import assign_rows
from ddm_ray.data.partition.clustering import Clustering, RowsReader, fit_clustering, pooled_pixels
from ddm_ray.data.partition.passes import InProcess
from ddm_ray.data.partition.sample import RowSample
from ddm_ray.data.schema import images
from ddm_ray.errors import DataError
from ddm_ray.run.graph import ROWS
from ddm_ray.run.run import Run
from tests.data.groups import rows, run_of
from tests.data.rows import commit_rows, commit_tables, read_artifact

pytestmark = pytest.mark.contract

FOUR = ("partition.num_clusters=4", "partition.num_fine=32")


def quiet(share: float, note: str) -> None:
    assert 0 <= share <= 1 and note


def clusters_by_id(run: Run) -> tuple[dict[str, int], np.ndarray]:
    """Each row's cluster, and the counts of training rows."""
    reader = RowsReader(run, ROWS)
    clustering = fit_clustering(reader, quiet, InProcess())[0] if run.config.partition.by_kmeans else None
    assigned = assign_rows(reader, clustering, quiet, InProcess())
    ids = read_artifact(run, ROWS, ["id"])["id"].to_pylist()
    cluster_N = np.concatenate([*map(assigned.clusters, reader.parts(None, quiet))])
    if not reader.manifest.info["dropped"]:
        assert len(ids) == len(cluster_N)
    return dict(zip(ids, cluster_N.tolist(), strict=False)), assigned.rows_train_K


@pytest.mark.parametrize("method", ["embeddings", "pixels"])
@pytest.mark.parametrize("metric", ["euclidean", "spherical"])
def test_known_groups_are_found(method, metric, tmp_path):
    truth = rows()
    run = run_of(str(tmp_path / "run"), truth, *FOUR, f"partition.method={method}", f"partition.metric={metric}")
    cluster_of, _ = clusters_by_id(run)
    ari = adjusted_rand_score(truth.group_N, [cluster_of[row_id] for row_id in truth.ids])
    # Shades are on a line through their mean: they have two directions.
    assert ari > (0.9 if (method, metric) != ("pixels", "spherical") else 0.3)


def test_the_families_of_shapes_are_found_in_their_pixels(tmp_path):
    settings = ("data.source=shapes:3000", "data.channels=3", "data.image_size=16", "data.class_names=[]")
    settings += ("data.num_classes=12", "partition.method=pixels", "partition.num_clusters=12")
    settings += ("partition.num_fine=128", "expert.train.batch=4")
    run = commit_rows(str(tmp_path / "run"), settings, chunk_rows=1024)
    cluster_of, _ = clusters_by_id(run)
    labels = read_artifact(run, ROWS, ["label"])["label"].to_pylist()
    assert adjusted_rand_score(labels, list(cluster_of.values())) > 0.9


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 999),
    num_clusters=st.sampled_from([2, 4, 8]),
    slack=st.floats(1.0, 1.6),
    num_rows=st.integers(100, 900),
    skew=st.floats(0.2, 0.97),
)
@example(seed=227, num_clusters=8, slack=1.5, num_rows=674, skew=0.5)  # a centroid of the sample is nobody's
def test_no_cluster_has_more_than_its_share_of_the_training_rows(
    tmp_path_factory, seed, num_clusters, slack, num_rows, skew
):
    folder = tmp_path_factory.mktemp("bound")
    max_share = min(1.0, slack / num_clusters)
    balance = (f"partition.num_clusters={num_clusters}", "partition.num_fine=20", f"partition.max_share={max_share}")
    truth = rows((skew, (1 - skew) / 2, (1 - skew) / 2), num_rows, seed=seed)
    run = run_of(str(folder / "run"), truth, *balance, "partition.sample_rows=80", part_rows=130)
    cluster_of, rows_K = clusters_by_id(run)
    table = read_artifact(run, ROWS, ["id", "split"])
    train_ids = table.filter(np.array(table["split"].to_pylist()) == "train")["id"].to_pylist()
    counted_K = np.bincount([cluster_of[row_id] for row_id in train_ids], minlength=num_clusters)
    assert counted_K.tolist() == rows_K.tolist()
    most = capacity(len(train_ids), max_share, num_clusters)
    assert counted_K.max() <= most
    assert most <= max(max_share * len(train_ids) + 1e-6, len(train_ids) / num_clusters + 1)


def test_balanced_clusters_are_the_nearest_that_have_room_and_split_by_key(tmp_path):
    truth = rows((0.7, 0.1, 0.1, 0.1))
    run = run_of(str(tmp_path / "run"), truth, *FOUR, "partition.max_share=0.4")
    cluster_of, rows_K = clusters_by_id(run)
    cluster_N = np.array([cluster_of[row_id] for row_id in truth.ids])
    assert rows_K.max() <= 0.4 * rows_K.sum()
    # Small groups stay whole: only the rows beyond the bound of the large one move.
    for group in (1, 2, 3):
        assert len(set(cluster_N[truth.group_N == group])) == 1
    centroids = fit_clustering(RowsReader(run, ROWS), quiet, InProcess())[0].centroids
    fine_N = ((truth.embeddings_ND[:, None] - centroids.fine_FD) ** 2).sum(-1).argmin(1)
    key_N = shuffle_keys(truth.ids)
    split = [fine for fine in np.unique(fine_N) if len(set(cluster_N[fine_N == fine])) > 1]
    assert 1 <= len(split) <= 3
    for fine in split:
        in_order = cluster_N[fine_N == fine][np.argsort(key_N[fine_N == fine])]
        assert np.count_nonzero(np.diff(in_order)) == len(set(in_order)) - 1, "a range of keys each"


def test_nearest_by_fine_or_by_coarse(tmp_path):
    truth = rows((0.5, 0.5), dim=2)
    flat = np.random.default_rng(0).uniform(-1, 1, truth.embeddings_ND.shape).astype(np.float32)
    truth = type(truth)(truth.ids, truth.group_N, flat, truth.pixels_NCHW)
    by_nearest = {}
    for nearest in ("coarse", "fine"):
        run = run_of(str(tmp_path / nearest), truth, *FOUR, f"partition.nearest={nearest}")
        by_nearest[nearest] = clusters_by_id(run)[0]
        centroids = fit_clustering(RowsReader(run, ROWS), quiet, InProcess())[0].centroids
    by_fine_N = centroids.fine_to_coarse_F[((flat[:, None] - centroids.fine_FD) ** 2).sum(-1).argmin(1)]
    by_coarse_N = ((flat[:, None] - centroids.coarse_KD) ** 2).sum(-1).argmin(1)
    assert by_nearest["fine"] == dict(zip(truth.ids, by_fine_N.tolist(), strict=True))
    assert by_nearest["coarse"] == dict(zip(truth.ids, by_coarse_N.tolist(), strict=True))
    assert by_nearest["fine"] != by_nearest["coarse"]


def test_random_clusters_are_alike_and_say_nothing_of_key_split_or_group(tmp_path):
    truth = rows(num_rows=8000)
    by_seed = {}
    for seed in (0, 1):
        run = run_of(str(tmp_path / str(seed)), truth, *FOUR, "partition.method=random", f"partition.seed={seed}")
        by_seed[seed] = clusters_by_id(run)[0]
    first_N, second_N = (np.array([by_id[row_id] for row_id in truth.ids]) for by_id in by_seed.values())
    held_N = np.array(read_artifact(run, ROWS, ["split"])["split"].to_pylist()) == "heldout"
    low_N = shuffle_keys(truth.ids) < np.uint64(2**62)
    for part_N in (held_N, low_N, truth.group_N == 0, first_N == 0):
        counts_K = np.bincount(second_N[part_N], minlength=4)
        # 5 standard deviations of a fair draw.
        assert abs(counts_K - part_N.sum() / 4).max() < 5 * np.sqrt(part_N.sum() * 3 / 16)


def test_label_clusters_are_ranges_of_classes(tmp_path):
    truth = rows((0.2,) * 5)
    run = run_of(
        str(tmp_path / "run"), truth, *FOUR, "partition.method=label", "data.num_classes=5", "data.class_names=[]"
    )
    cluster_of, _ = clusters_by_id(run)
    expected = [[0, 0, 1, 2, 3][label] for label in truth.group_N]
    assert [cluster_of[row_id] for row_id in truth.ids] == expected


@pytest.mark.parametrize("order_seed", range(3))
def test_a_sample_is_of_the_lowest_keys_in_their_order(order_seed):
    generator = np.random.default_rng(order_seed)
    key_N = shuffle_keys(f"row {number}" for number in range(1000))
    features_ND, number_N = generator.standard_normal((1000, 37)).astype(np.float32), np.arange(1000)
    lowest = np.argsort(key_N)
    for most in (1, 64, 999, 1000, 2000):
        sample = RowSample(most)
        for part in np.array_split(generator.permutation(1000), generator.integers(1, 30)):
            sample.add(key_N[part], features_ND[part], number_N[part])
            if generator.integers(2):
                sample.arrays()  # to look at it changes nothing
        features_SD, number_S = sample.arrays()
        assert (features_SD == features_ND[lowest[:most]]).all()
        assert (number_S == lowest[:most]).all()
        assert len(sample) == min(most, 1000)


class CountedArrays:
    """numpy, with the lengths of all arrays that its functions take added up."""

    def __init__(self):
        self.values = 0

    def __getattr__(self, name):
        function = getattr(np, name)
        if isinstance(function, type) or not callable(function):
            return function

        def counted(*arguments, **named):
            arrays = [value for value in arguments if isinstance(value, np.ndarray)]
            self.values += sum(len(value) for value in arrays)
            made = function(*arguments, **named)
            self.values += len(made) if isinstance(made, np.ndarray) else 0
            return made

        return counted


@pytest.mark.parametrize("size", [8, 4_000, 20_000, 100_000])
def test_the_work_of_a_sample_is_that_of_the_rows_and_not_of_the_parts(size, monkeypatch):
    """As many rows in twenty times as many parts are no more work: no part looks at the whole sample."""
    key_N, work = shuffle_keys(map(str, range(20_000))), []
    for part_rows in (50, 1_000):
        numpy = CountedArrays()
        monkeypatch.setattr("ddm_ray.data.partition.sample.np", numpy)
        sample = RowSample(size)
        numpy.values = 0  # without making the slots
        for begin in range(0, len(key_N), part_rows):
            sample.add(key_N[begin : begin + part_rows])
        assert len(sample) == min(size, len(key_N))
        work.append(numpy.values)
    assert work[0] < 2 * work[1]


def test_duplicates_that_were_dropped_are_left_out(tmp_path):
    settings = ("data.source=shapes:60", "data.channels=3", "data.image_size=8", "data.num_classes=12", *FOUR)
    run = commit_rows(str(tmp_path / "run"), (*settings, "data.class_names=[]", "data.duplicates=drop"), chunk_rows=32)
    table = pa.concat_tables(RowsReader(run, ROWS).parts(None, quiet))
    run.store.delete(ROWS)
    # Every third row comes twice, under another id.
    again = table.take(list(range(0, 60, 3)))
    renamed = again.set_column(0, "id", [[f"again/{row_id}" for row_id in again["id"].to_pylist()]])
    commit_tables(run, [table, renamed])
    reader = RowsReader(run, ROWS)
    assert reader.manifest.info["dropped"] == 20
    left = [row_id for part in reader.parts([], quiet) for row_id in part["id"].to_pylist()]
    assert len(left) == len(set(left)) == 60
    hashes = dict(zip(*(table[name].to_pylist() for name in ("id", "content_hash")), strict=True))
    assert {hashes[row_id.removeprefix("again/")] for row_id in left} == set(hashes.values())


def test_pooled_pixels_are_averages_and_deviations():
    images_NCHW = np.random.default_rng(0).standard_normal((5, 3, 16, 16)).astype(np.float32)
    pooled_ND = pooled_pixels(images_NCHW)
    averages = images_NCHW.reshape(5, 3, 4, 4, 4, 4).mean(axis=(3, 5)).reshape(5, 48)
    np.testing.assert_allclose(pooled_ND[:, :48], averages, atol=1e-6)
    np.testing.assert_allclose(pooled_ND[:, 48:], images_NCHW.std(axis=(2, 3)), rtol=1e-5)
    odd_NCHW = images_NCHW[..., :7, :7].copy()
    shared = [slice(0, 2), slice(1, 4), slice(3, 6), slice(5, 7)]  # quarters of 7 pixels
    averages = np.stack([odd_NCHW[..., y, x].mean(axis=(2, 3)) for y in shared for x in shared], axis=2)
    np.testing.assert_allclose(pooled_pixels(odd_NCHW)[:, :48], averages.reshape(5, 48), atol=1e-6)


def test_pixels_are_scaled_by_the_training_rows_and_kept_so(tmp_path):
    run = run_of(str(tmp_path / "run"), rows(), *FOUR, "partition.method=pixels")
    clustering, num_sampled = fit_clustering(RowsReader(run, ROWS), quiet, InProcess())
    features = clustering.features
    table = read_artifact(run, ROWS)
    train = table.filter(np.array(table["split"].to_pylist()) == "train")
    assert num_sampled == train.num_rows
    scaled_ND = features(train).astype(np.float64)
    np.testing.assert_allclose(scaled_ND.mean(axis=0), 0, atol=1e-4)
    np.testing.assert_allclose(scaled_ND.std(axis=0), 1, atol=1e-4)
    again = Clustering.from_bytes(run, clustering.to_bytes())
    assert (again.features(table) == features(table)).all()
    assert all((vars(again.centroids)[name] == value).all() for name, value in vars(clustering.centroids).items())
    constant = pooled_pixels(np.zeros_like(images(table, run.config.data)))
    assert np.isfinite(features.scaled(constant)).all()


def test_embeddings_without_a_direction_are_refused_by_name(tmp_path):
    truth = rows()
    truth.embeddings_ND[7] = 0
    run = run_of(str(tmp_path / "run"), truth, *FOUR, "partition.metric=spherical")
    line = f"^{run.url}: 1 embeddings are zero and have no direction, e.g. of 0/000007; check embedder and"
    with pytest.raises(DataError, match=line):
        clusters_by_id(run)
