"""Numbers of a partition: agreement with classes, and warnings that follow from sizes. C classes, K clusters."""

from collections.abc import Sequence

import numpy as np

from ddm_ray.config import RunConfig
from ddm_ray.run.info import ClusterFit, PartitionInfo, ShardInfo
from ddm_ray.spelling import some

FAR = 99
"""An appended row is far if it is beyond this percentile of the earlier rows' distances from its centroid."""
UNLIKE, MIN_FAR = 0.1, 3
"""Minimum share and minimum number of far new rows at which they are called unlike the earlier ones."""


def partition_info(shards: Sequence[ShardInfo]) -> PartitionInfo:
    """The numbers of a partition that follow from its shards' manifests, given in order of their clusters."""
    counts_CK = np.array([info.counts_C for info in shards], np.int64).T
    return PartitionInfo(
        counts_CK=counts_CK.tolist(),
        rows_K=tuple(info.rows_train for info in shards),
        rows_heldout_K=tuple(info.rows_heldout for info in shards),
        ari=_adjusted_rand(counts_CK) if len(counts_CK) > 1 else None,
        networks={part: fingerprint for info in shards for part, fingerprint in info.networks.items()},
    )


def _adjusted_rand(counts_CK: np.ndarray) -> float:
    """The adjusted Rand index of classes and clusters, from the number of rows that each pair shares."""
    both, classes, clusters, all_pairs = (
        float((counts * (counts - 1.0) / 2).sum())
        for counts in (counts_CK, counts_CK.sum(axis=1), counts_CK.sum(axis=0), counts_CK.sum())
    )
    by_chance = classes * clusters / all_pairs if all_pairs else 0.0
    most = (classes + clusters) / 2
    return (both - by_chance) / (most - by_chance) if most != by_chance else 1.0


def size_warnings(config: RunConfig, info: PartitionInfo) -> list[str]:
    """A line for each cluster that takes most of the rows, and one for all that have very few."""
    rows_K = np.array(info.rows_K)
    num_clusters, num_rows = len(rows_K), int(rows_K.sum())
    lines = []
    clusters = config.partition.clusters
    for each in np.flatnonzero(rows_K >= min(0.9, 2.5 / num_clusters) * num_rows) if num_clusters > 1 else ():
        cure = "; try a run with partition.max_share, another embedder or metric" if config.partition.by_kmeans else ""
        lines.append(
            f"cluster {clusters[each]} has {rows_K[each] / num_rows:.0%} of the training rows, where an equal share is"
            f" {1 / num_clusters:.0%}: its expert has most to learn in the same number of steps{cure}"
        )
    least_K = np.maximum([config.expert_of(each).train.batch for each in clusters], int(0.1 / num_clusters * num_rows))
    if len(tiny := np.flatnonzero(rows_K < least_K)):
        names, cure = some([str(clusters[each]) for each in tiny], 8), "try a run with fewer partition.num_clusters"
        lines.append(
            f"clusters of fewer than {least_K[tiny].max():,} training rows, which their experts see again and again:"
            f" {names}" + (f"; {cure}" if config.partition.by_kmeans else "")
        )
    return lines


def unlike(config: RunConfig, fit: Sequence[ClusterFit]) -> list[str]:
    """A line if appended rows are unlike the rows that the clusters were made from; empty if they are alike."""
    rows, far = sum(each.rows for each in fit if each.far is not None), sum(each.far or 0 for each in fit)
    if far < max(MIN_FAR, UNLIKE * rows):
        return []
    most = config.partition.clusters[max(range(len(fit)), key=lambda each: fit[each].far or 0)]
    return [
        f"{far:,} of {rows:,} new rows are farther from the centre of their cluster than {FAR} % of the earlier rows"
        f" are, most of them in cluster {most}: these pictures are unlike those that the clusters were made of; look at"
        " them, and begin a new run of all of them rather than go on"
    ]
