"""Renders a partition's report as one self-contained page. C classes, K clusters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddm_ray.config import RunConfig
from ddm_ray.core.kmeans import Centroids
from ddm_ray.data.partition.numbers import FAR
from ddm_ray.pictures.page import render_page
from ddm_ray.run.info import PartitionInfo, ReportInfo

KINDS = {"share": "share", "mostly": "text", "for example": "text", "images": "images"}
TOP_CLASSES, CAPTIONS, CAPTION_LETTERS = 4, 3, 60


@dataclass(frozen=True)
class Shown:
    """A row on the page: a small image, and its caption if it has one."""

    png: bytes
    caption: str


def render_partition(
    config: RunConfig,
    info: PartitionInfo,
    report: ReportInfo,
    centroids: Centroids | None,
    shown_K: Sequence[Sequence[Shown]],
    projection: bytes | None,
    facts: Mapping[str, str],
) -> str:
    """Render report.html. `projection`: a picture of the embeddings, if there are some; `facts`: additional facts."""
    table = _table(config, info, report, centroids, shown_K)
    return render_page(
        "partition",
        title=f"{config.name}: {len(info.rows_K)} clusters",
        info=info,
        warnings=report.warnings,
        sentences=_sentences(info, report),
        projection=projection,
        columns=list(table),
        kinds=KINDS,
        rows=[dict(zip(table, cells, strict=True)) for cells in zip(*table.values(), strict=True)],
        largest_share=max(table["share"]),
        facts={**_facts(config), **facts},
    )


def _sentences(info: PartitionInfo, report: ReportInfo) -> list[str]:
    lines = [f"Clusters have {min(info.rows_K):,} to {max(info.rows_K):,} training rows"]
    if info.imbalance is not None:
        lines[0] += f", {info.imbalance:.2f} times as many"
    lines[0] += f"; the entropy of their shares is {info.entropy:.3f} of that of equal ones."
    if report.silhouette is not None:
        lines.append(f"Silhouette of the embeddings: {report.silhouette:.3f} (1: far apart, 0: no borders).")
    if info.ari is not None:
        lines.append(f"Adjusted Rand index with the classes: {info.ari:.3f} (1: clusters are classes, 0: chance).")
    return lines


def _table(
    config: RunConfig,
    info: PartitionInfo,
    report: ReportInfo,
    centroids: Centroids | None,
    shown_K: Sequence[Sequence[Shown]],
) -> dict[str, Sequence[Any]]:
    """The table of clusters by column. Shares are numbers in [0, 1], images are Shown, everything else is text."""
    total = sum(info.rows_K)
    table: dict[str, Sequence[Any]] = {"cluster": [str(cluster) for cluster in range(len(info.rows_K))]}
    if any(shown_K):
        table["images"] = shown_K
    table |= {
        "training rows": [f"{rows:,}" for rows in info.rows_K],
        "share": [rows / total for rows in info.rows_K],
        "held out": [f"{rows:,}" for rows in info.rows_heldout_K],
    }
    if report.silhouette is not None:
        table["silhouette"] = ["–" if value is None else f"{value:.3f}" for value in report.silhouette_K]
    if centroids is not None and len(centroids.coarse_KD) > 1:
        table["next cluster"] = _next_clusters(centroids.coarse_KD)
    if report.fit:
        table["appended"] = [f"{each.rows:,}" for each in report.fit]
        table[f"farther than {FAR} % of the earlier"] = [
            "–" if each.far is None else f"{each.far:,}" for each in report.fit
        ]
    if info.counts_CK:
        counts_KC = list(zip(*info.counts_CK, strict=True))
        table["mostly"] = [_mostly(counts_C, config.data.class_names) for counts_C in counts_KC]
    if config.data.text is not None and any(shown_K):
        table["for example"] = ["; ".join(_short(row.caption) for row in shown[:CAPTIONS]) for shown in shown_K]
    return table


def _next_clusters(coarse_KD: np.ndarray) -> list[str]:
    """The nearest other centroid of each centroid, and its distance."""
    cells = []
    for cluster, own_D in enumerate(coarse_KD):
        distance_K = np.linalg.norm(coarse_KD - own_D, axis=1)
        distance_K[cluster] = np.inf
        cells.append(f"{distance_K.argmin()} at {distance_K.min():.3g}")
    return cells


def _short(caption: str) -> str:
    return caption if len(caption) < CAPTION_LETTERS else caption[: CAPTION_LETTERS - 1] + "…"


def _mostly(counts_C: Sequence[int], names: Sequence[str]) -> str:
    """The most frequent classes of a cluster, with their shares of it."""
    total = sum(counts_C)
    top = sorted(range(len(counts_C)), key=lambda label: (-counts_C[label], label))[:TOP_CLASSES]
    return ", ".join(f"{names[label]} ({counts_C[label] / total:.0%})" for label in top if counts_C[label])


def _facts(config: RunConfig) -> dict[str, str]:
    partition, embedder = config.partition, config.embedder
    facts: dict[str, str] = {"method": partition.method}
    if not partition.given:  # owners' sources aren't known
        facts = {"source": config.data.source, **facts}
        name = f"PCA of pixels, {embedder.dim} components" if embedder.kind == "pixels" else embedder.network
        facts["embedder"] = name if embedder.kind == "pixels" else f"{name} ({embedder.kind})"
    if partition.by_kmeans:
        facts |= {
            "metric": partition.metric,
            "a row's cluster": "that of its nearest "
            + (
                f"{partition.nearest} centroid"
                if partition.max_share is None
                else "fine centroid, as far as there is room"
            ),
            "most of the rows in one cluster": "any" if partition.max_share is None else f"{partition.max_share:.1%}",
            "fine centroids": f"{partition.num_fine:,} at most, {partition.iterations} iterations",
            "rows they are fitted on": f"{partition.sample_rows:,} at most",
        }
    return facts if partition.method in ("label", "given") else facts | {"seed": str(partition.seed)}
