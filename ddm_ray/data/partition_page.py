"""The partition's report as one self-contained page. C classes, K clusters."""

import base64
import html
from collections.abc import Mapping, Sequence
from typing import Any

from ddm_ray.config import RunConfig

STYLE = """
body { font: 16px/1.55 system-ui, sans-serif; color: #1d1f24; background: #fcfcfa;
  max-width: 76rem; margin: 2.5rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.7rem; margin-bottom: .2rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
p { max-width: 52rem; } .dim, figcaption { color: #687080; font-size: .9rem; }
.warning { background: #fdecd2; border-left: .4rem solid #d9480f; padding: .6rem 1rem; font-weight: 600; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .93rem; }
th, td { text-align: right; padding: .3rem .6rem; white-space: nowrap; border-bottom: 1px solid #dcdfe4; }
th.text, td.text { text-align: left; white-space: normal; } th.share, td.share { text-align: left; min-width: 11rem; }
th.text, td.text { min-width: 12rem; }
.bar { display: inline-block; height: .7rem; margin-right: .5rem; background: #7aa66a; border-radius: 2px; }
figure { margin: 1rem 0; } img { max-width: 100%; }
"""
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
    num_clusters, num_rows = len(info["rows_K"]), sum(info["rows_K"])
    title = html.escape(f"{config.name}: {num_clusters} clusters")
    parts = [
        f"<h1>{title}</h1>",
        f'<p class="dim">{num_rows:,} training rows, {sum(info["rows_heldout_K"]):,} held out.</p>',
        *(f'<p class="warning">Warning: {html.escape(warning)}.</p>' for warning in warnings),
        f"<p>{html.escape(' '.join(_sentences(info)))}</p>",
        *(_figure(name, files[name]) for name in ("clusters.png",) if name in files),
        "<h2>Clusters</h2>",
        _table(config, info, columns),
        *(_figure(name, files[name]) for name in ("projection.png", "fine.png") if name in files),
        "<h2>How they were made</h2>",
        "<table>",
        *(
            f'<tr><td class="text">{html.escape(name)}</td><td class="text">{html.escape(value)}</td></tr>'
            for name, value in {**_facts(config), **facts}.items()
        ),
        "</table>",
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>'
        f"<body>{''.join(parts)}</body></html>\n"
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


def _table(config: RunConfig, info: Mapping[str, Any], columns: Mapping[str, Sequence[str]]) -> str:
    rows_K, total = info["rows_K"], sum(info["rows_K"])
    table: dict[str, list[str]] = {
        "cluster": [str(cluster) for cluster in range(len(rows_K))],
        "training rows": [f"{rows:,}" for rows in rows_K],
        "share": [_bar(rows / total, max(rows_K) / total) for rows in rows_K],
        "held out": [f"{rows:,}" for rows in info["rows_heldout_K"]],
    }
    if info["silhouette"] is not None:
        table["silhouette"] = ["–" if value is None else f"{value:.3f}" for value in info["silhouette_K"]]
    table |= {name: [html.escape(text) for text in texts] for name, texts in columns.items()}
    if info["counts_CK"]:
        counts_KC = list(zip(*info["counts_CK"], strict=True))
        table["mostly"] = [html.escape(_mostly(counts_C, config.data.class_names)) for counts_C in counts_KC]
    kinds = {"share": ' class="share"', "mostly": ' class="text"', "for example": ' class="text"'}
    head = "".join(f"<th{kinds.get(name, '')}>{name}</th>" for name in table)
    lines = (
        "".join(f"<td{kinds.get(name, '')}>{cell}</td>" for name, cell in zip(table, cells, strict=True))
        for cells in zip(*table.values(), strict=True)
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'


def _bar(share: float, largest: float) -> str:
    return f'<span class="bar" style="width: {7 * share / largest:.2f}rem"></span>{share:.1%}'


def _mostly(counts_C: Sequence[int], names: Sequence[str]) -> str:
    """The most frequent classes of a cluster with their shares of it."""
    total = sum(counts_C)
    top = sorted(range(len(counts_C)), key=lambda label: (-counts_C[label], label))[:TOP_CLASSES]
    return ", ".join(f"{names[label]} ({counts_C[label] / total:.0%})" for label in top if counts_C[label])


def _facts(config: RunConfig) -> dict[str, str]:
    partition, embedder = config.partition, config.embedder
    facts: dict[str, str] = {"method": partition.method}
    if partition.method != "given":  # of owners' sources nothing is told
        facts = {"source": config.data.source, **facts}
        name = f"PCA of pixels, {embedder.dim} components" if embedder.kind == "pixels" else embedder.model
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


def _figure(name: str, png: bytes) -> str:
    heading, caption = CAPTIONS[name]
    image = f'<img alt="{heading}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'
    return f"<h2>{heading}</h2><figure>{image}<figcaption>{caption}</figcaption></figure>"
