"""From rows to centroids, part by part: features to cluster by, a sample of the rows, and its k-means.

N rows of a part, S of the sample, D dimensions, F fine centroids, K clusters, CHW of the modelled data.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
import safetensors.numpy

from ddm_ray.core.kmeans import Centroids, two_level_kmeans, unit_length
from ddm_ray.data import OnProgress
from ddm_ray.data.columns import read_columns
from ddm_ray.data.order import shuffle_keys
from ddm_ray.data.partition.passes import Executor
from ddm_ray.data.partition.sample import RowSample, likely_limit
from ddm_ray.data.read_ahead import read_ahead
from ddm_ray.data.schema import DUPLICATES, embeddings, images, read_parquet, trains
from ddm_ray.errors import DataError
from ddm_ray.run.graph import CENTROIDS, Artifact
from ddm_ray.run.info import RowsInfo
from ddm_ray.run.listing import with_all_files
from ddm_ray.run.manifest import Manifest
from ddm_ray.run.run import Run

COLUMNS = {"embeddings": ["embedding"], "pixels": ["data"], "label": ["label"]}
"""Columns that determine a row's cluster, by the partition's method."""
POOLED_SIDE = 4
AHEAD_BYTES, MAX_READERS = 24 * 2**20, 16
"""Limits of reading ahead. Small parts in an object store mostly wait for the first byte, so many are read at once."""


class RowsReader:
    """The rows of a finished artifact, part by part, without dropped duplicates."""

    def __init__(self, run: Run, artifact: Artifact):
        """Raises MissingArtifact, DriftError, CorruptArtifact."""
        self.run, self.artifact, self.manifest = run, artifact, with_all_files(run, run.require(artifact))
        parts = sorted(name for name in self.manifest.files if name.startswith("part-"))
        self.sizes = {name: self.manifest.files[name].bytes for name in parts}
        self.num_train = RowsInfo.of(self.manifest).rows_train
        self._dropped_keys = np.empty(0, np.uint64)
        if DUPLICATES in self.manifest.files:
            ids = self._read(DUPLICATES, ["id"])["id"].to_pylist()
            self._dropped_keys = np.sort(shuffle_keys(ids))

    @property
    def names(self) -> list[str]:
        """Names of the parts."""
        return list(self.sizes)

    def parts(
        self, columns: list[str] | None, on_progress: OnProgress, names: Sequence[str] | None = None
    ) -> Iterator[pa.Table]:
        """Yield each part's rows: id, split and `columns`, or all columns. `names`: only these parts.

        If `columns` are a small share of a part, only they are read.

        Reports progress over these parts. Reads the next parts ahead, up to AHEAD_BYTES of them and at least one.
        Raises CorruptArtifact naming the part.
        """
        began, num_rows, names = time.monotonic(), 0, self.names if names is None else names
        read = partial(self.read, columns=None if columns is None else ["id", "split", *columns])
        largest = max((self.sizes[name] for name in names), default=1)
        ahead = min(max(1, AHEAD_BYTES // max(1, largest)), MAX_READERS)
        for number, table in enumerate(read_ahead(read, names, ahead), 1):
            yield table
            num_rows += table.num_rows
            on_progress(number / len(names), pace(num_rows, began))

    def _without_dropped(self, table: pa.Table) -> pa.Table:
        if not len(self._dropped_keys):
            return table
        key_N = shuffle_keys(table["id"].to_pylist())
        place_N = np.searchsorted(self._dropped_keys, key_N).clip(max=len(self._dropped_keys) - 1)
        return table.filter(pa.array(self._dropped_keys[place_N] != key_N))

    def read(self, name: str, columns: list[str] | None) -> pa.Table:
        """One part's rows; see `parts`."""
        return self._without_dropped(self._read(name, columns))

    def _read(self, name: str, columns: list[str] | None) -> pa.Table:
        if columns is not None:
            return read_columns(self.run, self.artifact, name, self.manifest, columns)
        where = f"{self.run.url}/{self.artifact}/{name}"
        return read_parquet(self.run.read(self.artifact, name, self.manifest), where)


def pace(num_rows: int, began: float) -> str:
    """Describe the number of rows and the rate since `began`, a moment of the monotonic clock."""
    return f"{num_rows:,} rows, {num_rows / max(time.monotonic() - began, 1e-9):,.0f} rows/s"


@dataclass(frozen=True)
class ClusterFeatures:
    """Features to cluster rows by: embeddings, or pooled pixels of the images scaled to mean 0 and deviation 1."""

    run: Run
    mean_D: np.ndarray | None = None
    std_D: np.ndarray | None = None

    def __call__(self, table: pa.Table) -> np.ndarray:
        """features_ND float32 in the space of the centroids: of unit length if the metric is spherical."""
        features_ND = self.scaled(self.raw(table))
        return unit_length(features_ND) if self.run.config.partition.metric == "spherical" else features_ND

    def raw(self, table: pa.Table) -> np.ndarray:
        """features_ND float32 before any scaling. Raises DataError naming a row that has no direction."""
        config = self.run.config
        if config.partition.method == "pixels":
            return pooled_pixels(images(table, config.data))
        features_ND = embeddings(table)
        zero_N = np.count_nonzero(features_ND, axis=1) == 0
        if config.partition.metric == "spherical" and zero_N.any():
            what = "embeddings are zero and have no direction"
            row_id = table["id"][int(zero_N.argmax())].as_py()
            raise DataError(
                f"{self.run.url}: {zero_N.sum()} {what}, e.g. of {row_id}; check embedder and partition.metric"
            )
        return features_ND

    def scaled(self, features_ND: np.ndarray) -> np.ndarray:
        """Scale raw features of pixels to the sample's mean 0 and standard deviation 1; embeddings stay as they are."""
        return features_ND if self.mean_D is None else (features_ND - self.mean_D) / self.std_D


@dataclass(frozen=True)
class Clustering:
    """Centroids, and the features that they were fitted to."""

    features: ClusterFeatures
    centroids: Centroids

    def distances(self, table: pa.Table, cluster_N: np.ndarray) -> np.ndarray:
        """distance_N float32 of each row from the centroid of its cluster."""
        distance_N: np.ndarray = np.linalg.norm(self.features(table) - self.centroids.coarse_KD[cluster_N], axis=1)
        return distance_N

    def to_bytes(self) -> bytes:
        """A safetensors file of fine_FD, coarse_KD, fine_to_coarse_F and, for pixels, mean_D and std_D."""
        tensors = dict(vars(self.centroids))
        if self.features.mean_D is not None:
            tensors |= {"mean_D": self.features.mean_D, "std_D": self.features.std_D}
        return safetensors.numpy.save({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()})

    @classmethod
    def read(cls, run: Run, manifest: Manifest) -> "Clustering":
        """The clustering of a partition, by the manifest of its centroids. Raises CorruptArtifact."""
        [name] = manifest.files
        return cls.from_bytes(run, run.read(CENTROIDS, name, manifest))

    @classmethod
    def from_bytes(cls, run: Run, data: bytes) -> "Clustering":
        """The inverse of `to_bytes`, for a file with a verified checksum."""
        tensors = safetensors.numpy.load(data)
        features = ClusterFeatures(run, tensors.pop("mean_D", None), tensors.pop("std_D", None))
        return cls(features, Centroids(**tensors))


def pooled_pixels(images_NCHW: np.ndarray) -> np.ndarray:
    """features_ND: each channel's averages over a 4 x 4 grid, and its standard deviation; D = 17 C."""
    import torch  # imported here, since processes that read embeddings don't need it

    grid_NCLL = torch.nn.functional.adaptive_avg_pool2d(torch.from_numpy(images_NCHW), POOLED_SIDE)
    std_NC = images_NCHW.std(axis=(2, 3))
    return np.concatenate([grid_NCLL.flatten(1).numpy(), std_NC], axis=1, dtype=np.float32)


@dataclass(frozen=True)
class _Candidates:
    """Training rows with keys up to a limit, table by table: (key_N, features_ND), before any scaling."""

    features: ClusterFeatures
    limit: np.uint64

    def __call__(self, tables: Iterator[pa.Table]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for table in tables:
            train = table.filter(pa.array(trains(table)))
            key_N, features_ND = shuffle_keys(train["id"].to_pylist()), self.features.raw(train)
            yield key_N[key_N <= self.limit], features_ND[key_N <= self.limit]


def _sample(rows: RowsReader, features: ClusterFeatures, execute: Executor, on_progress: OnProgress) -> RowSample:
    """The training rows with the lowest keys, and their features."""
    config, num_rows = rows.run.config.partition, rows.num_train
    size = min(config.sample_rows, num_rows)
    likely = likely_limit(size, num_rows)
    for limit in [np.uint64(2**64 - 1)] if likely is None else [likely, np.uint64(2**64 - 1)]:
        sample = RowSample(size)
        for key_N, features_ND in execute.each(rows, _Candidates(features, limit), COLUMNS[config.method], on_progress):
            sample.add(key_N, features_ND)
        if len(sample) == size:
            break
    return sample


def fit_clustering(
    rows: RowsReader,
    on_progress: OnProgress,
    execute: Executor,
    num_clusters: int | None = None,
    features: ClusterFeatures | None = None,
) -> tuple[Clustering, int]:
    """Two-level k-means of a sample of the training rows (paper, section 4), and the number of rows in the sample.

    `num_clusters`: None means as many as are configured. `features`: those of other clusters that these are to be
    beside, with their scales. Raises DataError if there are too few rows, or too few different ones, to fill the
    clusters.
    """
    run, config = rows.run, rows.run.config.partition
    num_clusters = num_clusters or config.num_clusters
    beside = features is not None
    features = features or ClusterFeatures(run)
    sample = _sample(rows, features, execute, lambda share, note: on_progress(share / 2, f"sampling: {note}"))
    check_rows(run, len(sample), num_clusters)
    [features_SD] = sample.arrays()
    if config.method == "pixels" and beside:
        features_SD = features.scaled(features_SD)
    elif config.method == "pixels":
        std_D = features_SD.std(axis=0, dtype=np.float64)
        mean_D = features_SD.mean(axis=0, dtype=np.float64).astype(np.float32)
        features = ClusterFeatures(run, mean_D, np.where(std_D > 0, std_D, 1).astype(np.float32))
        features_SD = features.scaled(features_SD)
    on_progress(0.5, f"k-means of {len(features_SD):,} rows")
    try:
        centroids = two_level_kmeans(
            features_SD,
            config.num_fine,
            num_clusters,
            config.iterations,
            config.seed,
            config.metric,
            None if beside else config.max_share,
        )
    except DataError as error:
        raise DataError(f"{run.url}: {error}") from None
    return Clustering(features, centroids), len(features_SD)


def check_rows(run: Run, num_train: int, num_clusters: int) -> None:
    """Raises DataError for fewer training rows than clusters."""
    if num_train < num_clusters:
        raise DataError(
            f"{run.url}: partition.num_clusters is {num_clusters}, but there are only {num_train}"
            " training rows; begin a run with fewer"
        )
