"""Distances of rows that were appended from the centroids that there were, beside those of earlier rows.

N rows of a part, K clusters.
"""

import math
from dataclasses import dataclass

import numpy as np

from ddm_ray.data import OnProgress, phase
from ddm_ray.data.order import shuffle_keys
from ddm_ray.data.partition.assignment import nearest
from ddm_ray.data.partition.clustering import COLUMNS, Clustering, RowsReader
from ddm_ray.data.partition.distances import CLUSTER_BYTES, FILE, Distances
from ddm_ray.data.partition.numbers import FAR
from ddm_ray.data.prepare.new_files import earlier_rows
from ddm_ray.data.schema import trains
from ddm_ray.errors import CorruptArtifact
from ddm_ray.storage.graph import PARTITION, REPORT, ROWS
from ddm_ray.storage.info import ClusterFit, PartitionInfo
from ddm_ray.storage.manifest import Manifest
from ddm_ray.storage.run import Run

SAMPLE_ROWS, SAMPLE_PARTS = 2**16, 64
"""Rows, and parts that they are of, that a sample of earlier rows has about, where there are as many."""


@dataclass(frozen=True)
class Earlier:
    """Training rows that there were: how many of each cluster, and the distances of all or of a sample of them."""

    rows_K: tuple[int, ...]
    distances: Distances


def fits(new: Distances, earlier: Earlier) -> tuple[ClusterFit, ...]:
    """The fit of each cluster: `new` training rows, how many of them are far, and those that there were."""
    means_K, before_K = new.means(), earlier.distances.means()
    limit_K, far_K = earlier.distances.percentiles(FAR), earlier.distances.farther(new, FAR)
    return tuple(
        ClusterFit(
            rows=int(new.rows_K[cluster]),
            distance=means_K[cluster],
            rows_before=rows_before,
            distance_before=before_K[cluster],
            far_before=limit_K[cluster],
            far=far_K[cluster],
        )
        for cluster, rows_before in enumerate(earlier.rows_K)
    )


def earlier(run: Run, report: Manifest | None, clustering: Clustering, on_progress: OnProgress) -> Earlier:
    """The rows that a run appends its own to, as the `report` of their partition knows them; else of a sample.

    The sample is of parts that the partition's seed draws. Raises CorruptArtifact.
    """
    assert run.base
    rows_K = PartitionInfo.of(run.base.require(PARTITION)).rows_K
    if distances := _stored(run.base, report):
        return Earlier(rows_K, distances)
    distances = _sampled(run, clustering, on_progress)
    distances.stand_for(rows_K)
    return Earlier(rows_K, distances)


def _stored(run: Run, report: Manifest | None) -> Distances | None:
    """The distances that a finished report has; None for one of an older version."""
    if report is None or FILE not in report.files:
        return None
    where, fix = f"{run.url}/{REPORT}/{FILE}", run.remake(REPORT)
    most = CLUSTER_BYTES * run.config.partition.num_clusters
    if report.files[FILE].bytes > most:
        raise CorruptArtifact(f"{where}: has {report.files[FILE].bytes} bytes, and may have {most}", fix)
    data = run.read(REPORT, FILE, report)
    return Distances.from_bytes(data, run.config.partition.num_clusters, where, fix)


def _sampled(run: Run, clustering: Clustering, on_progress: OnProgress) -> Distances:
    """Distances of the training rows of some parts of the earlier rows, which are drawn."""
    config = run.config.partition
    readers = [RowsReader(chunks.run, ROWS) for chunks in earlier_rows(run)]
    every = [(number, name) for number, reader in enumerate(readers) for name in reader.names]
    rows = sum(reader.num_rows for reader in readers)
    parts = max(SAMPLE_PARTS, math.ceil(SAMPLE_ROWS * len(every) / max(rows, 1)))
    key_N = shuffle_keys(f"{config.seed} {number} {name}" for number, name in every)
    chosen = [every[place] for place in np.sort(np.argsort(key_N)[:parts])]
    distances, done = Distances(config.num_clusters), 0
    for number, reader in enumerate(readers):
        names = [name for of, name in chosen if of == number]
        until = done + len(names)
        part = phase(on_progress, done / len(chosen), until / len(chosen), f"a sample of {rows:,} earlier rows")
        for table in reader.parts(COLUMNS[config.method], part, names):
            train = np.flatnonzero(trains(table))
            cluster_N = nearest(clustering, table)
            distances.add(cluster_N[train], clustering.distances(table, cluster_N)[train])
        done = until
    return distances
