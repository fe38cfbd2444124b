"""Numbers of a partition: sizes, agreement with classes, and warnings that follow. C classes, K clusters."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ddm_ray.config import RunConfig
from ddm_ray.run.info import ClusterFit, PartitionInfo
from ddm_ray.spelling import some

FAR = 99
"""An appended row is far if it is beyond this percentile of the earlier rows' distances from its centroid."""
UNLIKE, MIN_FAR = 0.1, 3
"""Minimum share and minimum number of far new rows at which they are called unlike the earlier ones."""


def partition_numbers(counts_CK: np.ndarray, train_K: np.ndarray, heldout_K: np.ndarray) -> dict[str, Any]:
    """All numbers of a report that follow from counts of rows."""
    share_K = train_K / train_K.sum()
    positive = share_K[share_K > 0]
    # A single cluster counts as perfectly even.
    entropy = float(-(positive * np.log(positive)).sum() / np.log(len(train_K))) if len(train_K) > 1 else 1.0
    return {
        "counts_CK": counts_CK.tolist(),
        "rows_K": train_K.tolist(),
        "rows_heldout_K": heldout_K.tolist(),
        "imbalance": float(train_K.max() / train_K.min()) if train_K.min() else None,
        "entropy": entropy,
        "ari": _adjusted_rand(counts_CK) if len(counts_CK) > 1 else None,
    }


def _adjusted_rand(counts_CK: np.ndarray) -> float:
    """The adjusted Rand index of classes and clusters, from the number of rows that each pair shares."""
    both, classes, clusters, all_pairs = (
        float((counts * (counts - 1.0) / 2).sum())
        for counts in (counts_CK, counts_CK.sum(axis=1), counts_CK.sum(axis=0), counts_CK.sum())
    )
    by_chance = classes * clusters / all_pairs if all_pairs else 0.0
    most = (classes + clusters) / 2
    return (both - by_chance) / (most - by_chance) if most != by_chance else 1.0


def warnings_of(config: RunConfig, info: PartitionInfo, silhouette: float | None) -> list[str]:
    """One line per thing to check before training: a catch-all cluster, tiny ones, empty classes, no structure."""
    rows_K = np.array(info.rows_K)
    num_clusters, num_rows = len(rows_K), int(rows_K.sum())
    by_kmeans = config.partition.by_kmeans
    lines = []
    for cluster in np.flatnonzero(rows_K >= min(0.9, 2.5 / num_clusters) * num_rows):
        if num_clusters > 1:
            cure = "; try a run with partition.max_share, another embedder or metric" if by_kmeans else ""
            lines.append(
                f"cluster {cluster} has {rows_K[cluster] / num_rows:.0%} of the training rows, where an equal share is"
                f" {1 / num_clusters:.0%}: its expert has most to learn in the same number of steps{cure}"
            )
    batch, tenth = config.expert.train.global_batch // num_clusters, 0.1 / num_clusters * num_rows
    if len(tiny := np.flatnonzero(rows_K < max(batch, tenth))):
        names = some([str(cluster) for cluster in tiny], 8)
        why = f"a batch of an expert, {batch:,}" if batch >= tenth else f"a tenth of an equal share, {int(tenth):,}"
        one = len(tiny) == 1
        lines.append(
            f"cluster{'' if one else 's'} {names} {'has' if one else 'have'} fewer training rows than {why}"
            + ("; try a run with fewer partition.num_clusters" if by_kmeans else "")
        )
    classes = zip(config.data.class_names, info.counts_CK, strict=bool(info.counts_CK))
    if empty := [name for name, counts_K in classes if not sum(counts_K)]:
        of_all = f"{len(empty)} of {len(config.data.class_names)} classes"
        lines.append(f"{of_all} have no training row: {some(empty, 8)}")
    if by_kmeans and silhouette is not None and silhouette < 0.02:
        lines.append(
            f"the silhouette is {silhouette:.3f}: rows are hardly nearer to their own cluster than to the next"
            " one; try another embedder, or another partition.num_clusters"
        )
    return lines


def unlike(fit: Sequence[ClusterFit]) -> list[str]:
    """A line if appended rows are unlike the rows that the clusters were made from; empty if they are alike."""
    rows, far = sum(each.rows for each in fit if each.far is not None), sum(each.far or 0 for each in fit)
    if far < max(MIN_FAR, UNLIKE * rows):
        return []
    most = max(range(len(fit)), key=lambda cluster: fit[cluster].far or 0)
    return [
        f"{far:,} of {rows:,} new rows are farther from the centre of their cluster than {FAR} % of the earlier rows"
        f" are, most of them in cluster {most}: these pictures are unlike those that the clusters were made of; look at"
        " them, and begin a new run of all of them rather than go on"
    ]
