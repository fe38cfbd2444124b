"""The report of a partition, an artifact of its own: made with the partition, or later from its rows."""

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from ddm_ray.config import RunConfig
from ddm_ray.data import OnProgress, no_progress, phase
from ddm_ray.data.partition.assignment import Assigned, assign_rows
from ddm_ray.data.partition.clustering import Clustering, RowsReader
from ddm_ray.data.partition.passes import Executor, InProcess
from ddm_ray.data.partition.report_builder import Report, ReportBuilder
from ddm_ray.data.partition.state import has_files, invalidate
from ddm_ray.errors import CorruptArtifact, DriftError
from ddm_ray.run.graph import CENTROIDS, PARTITION, REPORT, ROWS
from ddm_ray.run.info import PartitionInfo, ReportInfo, RowsInfo
from ddm_ray.run.manifest import NAME, FileRecord, Manifest
from ddm_ray.run.run import Run

PAGE = "report.html"


def report(run: Run, progress: OnProgress | None = None, execute: Executor | None = None) -> None:
    """Make the report of a finished partition from its rows. A no-op if the report is finished.

    `execute`: see `stage.partition`. Raises MissingArtifact, CorruptArtifact, DriftError, StorageError, RayError.
    """
    on_progress, execute = progress or no_progress, execute or InProcess()
    partition = run.require(PARTITION)
    # An older version's partition lists its report's files in its own manifest, so they mustn't change.
    if finished_report(run) or f"{REPORT}/{PAGE}".removeprefix(f"{PARTITION}/") in partition.files:
        return
    changes = run.config.changes
    if run.config.partition.given or changes.made or not changes.pooled:
        commit_report(run, ReportBuilder(run.named, PartitionInfo.of(partition), 0).build())
        return
    rows = RowsReader(run, ROWS)
    clustering = Clustering.read(run, run.require(CENTROIDS)) if run.config.partition.by_kmeans else None
    with execute.session():
        counting = phase(on_progress, 0.0, 0.5, "clusters")
        appended = changes.appended is not None
        assigned = assign_rows(rows, clustering, counting, execute, balanced=not appended, appended=appended)
        report_of(rows, partition, assigned, phase(on_progress, 0.5, 1.0, "report"), execute)


def report_of(
    rows: RowsReader, partition: Manifest, assigned: Assigned, on_progress: OnProgress, execute: Executor
) -> None:
    """Make the report of a partition of these rows, given their clusters."""
    run = rows.run
    look = _Look(run.named, PartitionInfo.of(partition), assigned, _far_before(run))
    builder = look.builder()
    for part in execute.each(rows, look, look.columns(rows), on_progress):
        builder.join(part)
    commit_report(run, builder.build(RowsInfo.of(rows.manifest)))


def _far_before(run: Run) -> tuple[float | None, ...]:
    """`ReportInfo.far_K` of the rows that this run appends to; empty if it appends to none, or their report has none.

    Raises CorruptArtifact, DriftError for a damaged report of these rows.
    """
    before = run.base.finished(REPORT) if run.config.changes.appended and run.base else None
    far_K = ReportInfo.of(before).far_K if before else ()
    if not far_K or run.base is None:
        return ()
    return tuple(far_K[run.base.config.partition.position(cluster)] for cluster in run.config.partition.clusters)


@dataclass(frozen=True)
class _Look:
    """Builds the report of tables: yields one builder that has seen them all."""

    config: RunConfig
    info: PartitionInfo
    assigned: Assigned
    far_K: tuple[float | None, ...]

    def builder(self) -> ReportBuilder:
        return ReportBuilder(self.config, self.info, int(self.assigned.rows_train_K.sum()), self.far_K)

    def columns(self, rows: RowsReader) -> list[str]:
        shown = {"embedding": RowsInfo.of(rows.manifest).embedding_dim > 0, "text": self.config.data.text is not None}
        latents = self.config.data.latents is not None
        shown |= {"thumbnail": latents, "data": not latents}
        return sorted({*self.assigned.clusters.columns, *(name for name, needed in shown.items() if needed)})

    def __call__(self, tables: Iterator[pa.Table]) -> Iterator[ReportBuilder]:
        builder = self.builder()
        for table in tables:
            cluster_N = self.assigned.clusters(table)
            builder.add(table, cluster_N, self.assigned.distances(table, cluster_N))
        yield builder


def finished_report(run: Run) -> Manifest | None:
    """The manifest of a complete report of the current partition; None if there is none."""
    try:
        manifest = run.finished(REPORT)
    except (CorruptArtifact, DriftError):
        return None
    return manifest if manifest and has_files(run, REPORT, manifest) else None


def commit_report(run: Run, built: Report) -> None:
    """Write a report's page and manifest, and delete files of an earlier one. A concurrent writer's report is kept."""
    invalidate(run, REPORT, lambda: finished_report(run))
    if finished_report(run):
        return
    key = f"{REPORT}/{PAGE}"
    before = None if run.store.create(key, built.html) else run.store.read(key)
    if before is not None and before != built.html:
        run.store.write(key, built.html)
    manifest = run.commit_records(REPORT, {PAGE: FileRecord.of(built.html)}, built.info)
    # Another machine may render other bytes. If it has finished meanwhile, its page is restored.
    if before is not None and manifest.files.get(PAGE) == FileRecord.of(before):
        run.store.write(key, before)
    for other in run.store.sizes(REPORT).keys() - manifest.files.keys() - {NAME}:  # pictures of older versions
        run.store.delete_one(f"{REPORT}/{other}")
