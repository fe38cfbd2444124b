"""The partition's report as one self-contained page. C classes, K clusters."""

from collections.abc import Mapping, Sequence
from typing import Any

from ddm_ray.config import RunConfig
from ddm_ray.pictures.page import page as html_page

CAPTIONS = {
    "clusters.png": ("Images of each cluster", "Training rows, the same whenever the report is made again."),
    "projection.png": (
        "The clusters in two dimensions",
        "A sample of training rows by the two principal components of their embeddings.",
    ),
    "fine.png": (
        "From fine centroids to clusters",
        "Bright is near. Where a block's own line isn't the brightest, its cluster has no clear border.",
    ),
}
COLUMN_KINDS = {"share": "share", "mostly": "text", "for example": "text"}
TOP_CLASSES = 4


def page(
    config: RunConfig,
    info: Mapping[str, Any],
    warnings: Sequence[str],
    files: Mapping[str, bytes],
    columns: Mapping[str, Sequence[str]],
    facts: Mapping[str, str],
) -> str:
    """report.html: `info` as in Report, pictures by name, more columns of the table of clusters, more facts."""
    table = _table(config, info, columns)
    return html_page(
        "partition",
        title=f"{config.name}: {len(info['rows_K'])} clusters",
        info=info,
        warnings=warnings,
        sentences=_sentences(info),
        files=files,
        captions=CAPTIONS,
        columns=list(table),
        kinds=COLUMN_KINDS,
        rows=[dict(zip(table, cells, strict=True)) for cells in zip(*table.values(), strict=True)],
        largest_share=max(table["share"]),
        facts={**_facts(config), **facts},
    )


def _sentences(info: Mapping[str, Any]) -> list[str]:
    rows_K = info["rows_K"]
    lines = [f"Clusters have {min(rows_K):,} to {max(rows_K):,} training rows"]
    if info["imbalance"] is not None:
        lines[0] += f", {info['imbalance']:.2f} times as many"
    lines[0] += f"; the entropy of their shares is {info['entropy']:.3f} of that of equal ones."
    if info["silhouette"] is not None:
        lines.append(f"Silhouette of the embeddings: {info['silhouette']:.3f} (1: far apart, 0: no borders).")
    if info["ari"] is not None:
        lines.append(f"Adjusted Rand index with the classes: {info['ari']:.3f} (1: clusters are classes, 0: chance).")
    return lines


def _table(config: RunConfig, info: Mapping[str, Any], columns: Mapping[str, Sequence[str]]) -> dict[str, Sequence]:
    """The table of clusters, column by column; shares are numbers in [0, 1], all else is text."""
    rows_K, total = info["rows_K"], sum(info["rows_K"])
    table: dict[str, Sequence] = {
        "cluster": [str(cluster) for cluster in range(len(rows_K))],
        "training rows": [f"{rows:,}" for rows in rows_K],
        "share": [rows / total for rows in rows_K],
        "held out": [f"{rows:,}" for rows in info["rows_heldout_K"]],
    }
    if info["silhouette"] is not None:
        table["silhouette"] = ["–" if value is None else f"{value:.3f}" for value in info["silhouette_K"]]
    table |= columns
    if info["counts_CK"]:
        counts_KC = list(zip(*info["counts_CK"], strict=True))
        table["mostly"] = [_mostly(counts_C, config.data.class_names) for counts_C in counts_KC]
    return table


def _mostly(counts_C: Sequence[int], names: Sequence[str]) -> str:
    """The most frequent classes of a cluster with their shares of it."""
    total = sum(counts_C)
    top = sorted(range(len(counts_C)), key=lambda label: (-counts_C[label], label))[:TOP_CLASSES]
    return ", ".join(f"{names[label]} ({counts_C[label] / total:.0%})" for label in top if counts_C[label])


def _facts(config: RunConfig) -> dict[str, str]:
    partition, embedder = config.partition, config.embedder
    facts: dict[str, str] = {"method": partition.method}
    if not partition.given:  # of owners' sources nothing is told
        credit = {"pictures": config.data.credit} if config.data.credit else {}
        facts = {"source": config.data.source, **credit, **facts}
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
