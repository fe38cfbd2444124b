"""From rows to centroids, part by part: what is clustered of a row, a sample of the rows, its k-means.

N rows of a part, S of the sample, D dimensions, F fine centroids, K clusters, CHW of the modelled data.
"""

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import safetensors.numpy
import torch

from ddm_ray.core.kmeans import Centroids, two_level_kmeans, unit_length
from ddm_ray.data import Progress
from ddm_ray.data.order import ranks
from ddm_ray.data.schema import DUPLICATES, embeddings, images, read_parquet, trains
from ddm_ray.errors import DataError
from ddm_ray.storage.run import Run

COLUMNS = {"embeddings": ["embedding"], "pixels": ["data"], "label": ["label"]}
POOLED_SIDE = 4
SORTED_COLUMNS = 16


class Rows:
    """The rows of a finished artifact, part by part; duplicates that were dropped aren't among them."""

    def __init__(self, run: Run, artifact: str):
        """Raises MissingArtifact, DriftError, CorruptArtifact."""
        self.run, self.artifact, self.manifest = run, artifact, run.require(artifact)
        self.names = sorted(name for name in self.manifest.files if name.startswith("part-"))
        self._dropped = np.empty(0, np.uint64)
        if DUPLICATES in self.manifest.files:
            self._dropped = np.sort(ranks(self._table(DUPLICATES, ["id"])["id"].to_pylist()))

    def parts(self, columns: list[str] | None, tell: Progress) -> Iterator[pa.Table]:
        """Each part's rows, by `columns` and id and split, or all; `tell` hears of parts that the caller is done with.

        Two parts are in memory: the next one is read meanwhile. Raises CorruptArtifact naming the part.
        """
        began, seen = time.monotonic(), 0
        wanted = None if columns is None else ["id", "split", *columns]
        with ThreadPoolExecutor(1) as reader:
            coming = deque(reader.submit(self._table, name, wanted) for name in self.names[:1])
            for number in range(len(self.names)):
                table = coming.popleft().result()
                coming.extend(reader.submit(self._table, name, wanted) for name in self.names[number + 1 : number + 2])
                if len(self._dropped):
                    rank_N = ranks(table["id"].to_pylist())
                    place_N = np.searchsorted(self._dropped, rank_N).clip(max=len(self._dropped) - 1)
                    table = table.filter(pa.array(self._dropped[place_N] != rank_N))
                yield table
                seen += table.num_rows
                rate = seen / max(time.monotonic() - began, 1e-9)
                tell((number + 1) / len(self.names), f"{seen:,} rows, {rate:,.0f} rows/s")

    def _table(self, name: str, columns: list[str] | None) -> pa.Table:
        where = f"{self.run.url}/{self.artifact}/{name}"
        return read_parquet(self.run.read(self.artifact, name, self.manifest), where, columns)


@dataclass(frozen=True)
class Features:
    """What is clustered of a row: its embedding, or the pooled pixels of its image, to mean 0 and deviation 1."""

    run: Run
    mean_D: np.ndarray | None = None
    std_D: np.ndarray | None = None

    def __call__(self, table: pa.Table) -> np.ndarray:
        """features_ND float32, as the centroids are: to unit length if these are spherical."""
        features_ND = self.scaled(self.raw(table))
        return unit_length(features_ND) if self.run.config.partition.metric == "spherical" else features_ND

    def raw(self, table: pa.Table) -> np.ndarray:
        """features_ND float32 before any scaling. Raises DataError naming a row where they can't be clustered."""
        config = self.run.config
        if config.partition.method == "pixels":
            features_ND = pooled_pixels(images(table, config.data))
            self._refuse(table, ~np.isfinite(features_ND).all(axis=1), "images aren't finite", "data.latents")
            return features_ND
        features_ND = embeddings(table)
        self._refuse(table, ~np.isfinite(features_ND).all(axis=1), "embeddings aren't finite", "embedder.checkpoint")
        if config.partition.metric == "spherical":
            zero_N = np.count_nonzero(features_ND, axis=1) == 0
            self._refuse(table, zero_N, "embeddings are zero and have no direction", "embedder and partition.metric")
        return features_ND

    def scaled(self, features_ND: np.ndarray) -> np.ndarray:
        """Raw features to the sample's mean 0 and standard deviation 1, for pixels."""
        return features_ND if self.mean_D is None else (features_ND - self.mean_D) / self.std_D

    def _refuse(self, table: pa.Table, broken_N: np.ndarray, what: str, check: str) -> None:
        if broken_N.any():
            row_id = table["id"][int(broken_N.argmax())].as_py()
            raise DataError(f"{self.run.url}: {broken_N.sum()} {what}, e.g. of {row_id}; check {check}")


def pooled_pixels(images_NCHW: np.ndarray) -> np.ndarray:
    """features_ND: each channel's averages over a grid of 4 x 4, and its standard deviation; D = 17 C."""
    grid_NCLL = torch.nn.functional.adaptive_avg_pool2d(torch.from_numpy(images_NCHW), POOLED_SIDE)
    std_NC = images_NCHW.std(axis=(2, 3))
    return np.concatenate([grid_NCLL.flatten(1).numpy(), std_NC], axis=1, dtype=np.float32)


class Sample:
    """Features of the `most` rows of lowest ranks among all that are added: the same rows in whatever order."""

    def __init__(self, most: int):
        self._most, self._filled = most, 0
        self._rank_S = np.empty(most, np.uint64)
        self._features_SD: np.ndarray | None = None

    def add(self, rank_N: np.ndarray, features_ND: np.ndarray) -> None:
        if self._features_SD is None:
            # Memory is taken as rows are written to it, not now.
            self._features_SD = np.empty((self._most, features_ND.shape[1]), np.float32)
        filled = self._filled
        taken = np.arange(filled + len(rank_N))
        if len(taken) > self._most:
            all_ranks = np.concatenate([self._rank_S[:filled], rank_N])
            taken = np.argpartition(all_ranks, self._most - 1)[: self._most]
        arriving = taken[taken >= filled] - filled
        free = np.setdiff1d(np.arange(min(self._most, filled + len(rank_N))), taken[taken < filled])
        self._rank_S[free], self._features_SD[free] = rank_N[arriving], features_ND[arriving]
        self._filled = min(self._most, filled + len(rank_N))

    def features(self) -> np.ndarray:
        """features_SD in the order of the ranks; the sample's own memory."""
        if self._features_SD is None:
            return np.empty((0, 1), np.float32)
        order, features_SD = np.argsort(self._rank_S[: self._filled]), self._features_SD[: self._filled]
        for begin in range(0, features_SD.shape[1], SORTED_COLUMNS):  # by columns, so that there's no second copy
            columns = slice(begin, begin + SORTED_COLUMNS)
            features_SD[:, columns] = features_SD[order, columns]
        self._rank_S[: self._filled] = self._rank_S[order]
        return features_SD


def fit(rows: Rows, tell: Progress) -> tuple[Features, Centroids, int]:
    """What is clustered, the centroids of the training rows' sample, and its number of rows.

    Raises DataError for too few rows, or too few different ones, to fill the clusters.
    """
    run, config = rows.run, rows.run.config.partition
    features = Features(run)
    sample = Sample(min(config.sample_rows, rows.manifest.info["rows_train"]))
    for table in rows.parts(COLUMNS[config.method], lambda share, note: tell(share / 2, f"sampling: {note}")):
        table = table.filter(pa.array(trains(table)))
        sample.add(ranks(table["id"].to_pylist()), features.raw(table))
    features_SD = sample.features()
    check_rows(run, len(features_SD))
    if config.method == "pixels":
        std_D = features_SD.std(axis=0, dtype=np.float64)
        mean_D = features_SD.mean(axis=0, dtype=np.float64).astype(np.float32)
        features = Features(run, mean_D, np.where(std_D > 0, std_D, 1).astype(np.float32))
        features_SD = features.scaled(features_SD)
    tell(0.5, f"k-means of {len(features_SD):,} rows")
    try:
        centroids = two_level_kmeans(
            features_SD,
            config.num_fine,
            config.num_clusters,
            config.iterations,
            config.seed,
            config.metric,
            config.max_share,
        )
    except DataError as error:
        raise DataError(f"{run.url}: {error}") from None
    return features, centroids, len(features_SD)


def check_rows(run: Run, num_train: int) -> None:
    """Raises DataError for fewer training rows than clusters."""
    if num_train < run.config.partition.num_clusters:
        raise DataError(
            f"{run.url}: partition.num_clusters is {run.config.partition.num_clusters}, but there are only {num_train}"
            " training rows; begin a run with fewer"
        )


def to_safetensors(features: Features, centroids: Centroids) -> bytes:
    """fine_FD, coarse_KD, fine_to_coarse_F and, for pixels, mean_D and std_D."""
    tensors = vars(centroids) | (
        {} if features.mean_D is None else {"mean_D": features.mean_D, "std_D": features.std_D}
    )
    return safetensors.numpy.save({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()})


def from_safetensors(run: Run, data: bytes) -> tuple[Features, Centroids]:
    """The inverse of `to_safetensors`, of a file whose checksum was verified."""
    tensors = safetensors.numpy.load(data)
    features = Features(run, tensors.pop("mean_D", None), tensors.pop("std_D", None))
    return features, Centroids(**tensors)
