"""Renders a partition's report as one self-contained page. C classes, K clusters."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ddm_ray.config import RunConfig
from ddm_ray.data.partition.numbers import FAR
from ddm_ray.pictures.page import render_page
from ddm_ray.run.info import PartitionInfo, ReportInfo, RowsInfo

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
    shown_K: Sequence[Sequence[Shown]],
    rows: RowsInfo | None,
) -> str:
    """Render report.html. `rows`: the record of the rows, unless they are their owners'."""
    table = _table(config, info, report, shown_K)
    sentences = []
    if report.silhouette is not None:
        sentences.append(f"Silhouette of the embeddings: {report.silhouette:.3f} (1: far apart, 0: no borders).")
    if info.ari is not None:
        sentences.append(f"Adjusted Rand index with the classes: {info.ari:.3f} (1: clusters are classes, 0: chance).")
    return render_page(
        "partition",
        title=f"{config.name}: {len(info.rows_K)} clusters",
        info=info,
        warnings=report.warnings,
        sentences=[*sentences, *(_of_rows(rows) if rows else [])],
        columns=list(table),
        kinds=KINDS,
        rows=[dict(zip(table, cells, strict=True)) for cells in zip(*table.values(), strict=True)],
        largest_share=max(table["share"]),
    )


def _of_rows(rows: RowsInfo) -> Iterator[str]:
    """Sentences on images that are left out, on the losses of others, and on their owner."""
    for what, reasons in (("are left out", rows.reasons), ("lost something", rows.losses)):
        if reasons:
            yield f"Images that {what}: {'; '.join(f'{reason.rows:,} ({reason.reason})' for reason in reasons)}."
    if rows.credit:
        yield f"Pictures: {rows.credit}"


def _table(
    config: RunConfig, info: PartitionInfo, report: ReportInfo, shown_K: Sequence[Sequence[Shown]]
) -> dict[str, Sequence[Any]]:
    """The table of clusters by column. Shares are numbers in [0, 1], images are Shown, everything else is text."""
    total = sum(info.rows_K)
    table: dict[str, Sequence[Any]] = {"cluster": [str(cluster) for cluster in config.partition.clusters]}
    if any(shown_K):
        table["images"] = shown_K
    table |= {
        "training rows": [f"{rows:,}" for rows in info.rows_K],
        "share": [rows / total for rows in info.rows_K],
        "held out": [f"{rows:,}" for rows in info.rows_heldout_K],
    }
    if report.fit:
        table["appended"] = [f"{each.rows:,}" for each in report.fit]
        table[f"farther than {FAR} % of the earlier"] = [
            "–" if each.far is None else f"{each.far:,}" for each in report.fit
        ]
    if len(info.counts_CK) > 1:
        counts_KC = list(zip(*info.counts_CK, strict=True))
        table["mostly"] = [_mostly(counts_C, config.data.class_names) for counts_C in counts_KC]
    if config.data.text is not None and any(shown_K):
        table["for example"] = ["; ".join(_short(row.caption) for row in shown[:CAPTIONS]) for shown in shown_K]
    return table


def _short(caption: str) -> str:
    return caption if len(caption) < CAPTION_LETTERS else caption[: CAPTION_LETTERS - 1] + "…"


def _mostly(counts_C: Sequence[int], names: Sequence[str]) -> str:
    """The most frequent classes of a cluster, with their shares of it."""
    total = sum(counts_C)
    top = sorted(range(len(counts_C)), key=lambda label: (-counts_C[label], label))[:TOP_CLASSES]
    return ", ".join(f"{names[label]} ({counts_C[label] / total:.0%})" for label in top if counts_C[label])
