"""The report of a partition as an artifact of its own: made with the partition, or again of its rows."""

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from ddm_ray.config import RunConfig
from ddm_ray.data import OnProgress, no_progress, phase
from ddm_ray.data.partition.assignment import Assigned, assign_rows
from ddm_ray.data.partition.clustering import Clustering, RowsReader
from ddm_ray.data.partition.fit import Earlier, earlier
from ddm_ray.data.partition.passes import Executor, InProcess
from ddm_ray.data.partition.report_builder import Report, ReportBuilder, given_report
from ddm_ray.data.partition.state import has_files, invalidate
from ddm_ray.errors import CorruptArtifact, DriftError
from ddm_ray.storage.graph import CENTROIDS, PARTITION, REPORT, ROWS
from ddm_ray.storage.info import CentroidsInfo, PartitionInfo, RowsInfo
from ddm_ray.storage.manifest import FileRecord, Manifest, sha256
from ddm_ray.storage.run import Run


def report(run: Run, progress: OnProgress | None = None, execute: Executor | None = None) -> None:
    """Make the report of a finished partition, of its rows; a no-op if the report is finished.

    `execute`: see `stage.partition`. Raises MissingArtifact, CorruptArtifact, DriftError, StorageError, RayError.
    """
    on_progress, execute = progress or no_progress, execute or InProcess()
    partition = run.require(PARTITION)
    # The manifest of an older partition lists the files of its report, which must stay as they are.
    if finished_report(run) or f"{REPORT}/report.html".removeprefix(f"{PARTITION}/") in partition.files:
        return
    if run.config.partition.given:
        commit_report(run, given_report(run.named, PartitionInfo.of(partition)))
        return
    rows = RowsReader(run, ROWS)
    clustering = read_clustering(run, run.require(CENTROIDS)) if run.config.partition.by_kmeans else None
    with execute.session():
        assigned = assign_rows(rows, clustering, phase(on_progress, 0.0, 0.5, "clusters"), execute)
        report_of(rows, partition, assigned, phase(on_progress, 0.5, 1.0, "report"), execute)


def report_of(
    rows: RowsReader, partition: Manifest, assigned: Assigned, on_progress: OnProgress, execute: Executor
) -> None:
    """Make the report of a partition of these rows, whose clusters are known."""
    run, info, clustering = rows.run, PartitionInfo.of(partition), assigned.clustering
    look = _Look(run.named, info, assigned)
    before = None
    if run.appends and run.base and clustering:
        before = earlier(run, finished_report(run.base), clustering, phase(on_progress, 0.0, 0.3, "earlier rows"))
    builder = look.builder(before)
    for part in execute.each(rows, look, look.columns(rows), phase(on_progress, 0.3 if before else 0.0, 1.0)):
        builder.join(part)
    commit_report(run, build_report(builder, rows, clustering))


@dataclass(frozen=True)
class _Look:
    """Looks at tables for a report: a builder that has seen all that come together."""

    config: RunConfig
    info: PartitionInfo
    assigned: Assigned

    def builder(self, before: Earlier | None = None) -> ReportBuilder:
        return ReportBuilder(self.config, self.info, int(self.assigned.rows_train_K.sum()), before)

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


def build_report(builder: ReportBuilder, rows: RowsReader, clustering: Clustering | None) -> Report:
    """The report of a partition whose `rows` have all been added to `builder`."""
    run, info = rows.run, RowsInfo.of(rows.manifest)
    counts = {"rejected": info.rejected, "duplicates": info.duplicates, "dropped": info.dropped}
    counts["files of another kind"] = sum(info.ignored.values())
    facts = {name: f"{count:,}" for name, count in counts.items() if count}
    if clustering:
        facts["rows sampled"] = f"{CentroidsInfo.of(run.require(CENTROIDS)).rows_sampled:,}"
    if run.appends:
        facts["appended"] = f"{info.rows:,} rows of {info.source}, which the pictures are of"
    if (before := builder.earlier) and before.distances.measured < sum(before.rows_K):
        many = f"{before.distances.measured:,} of {sum(before.rows_K):,} training rows"
        facts["distances of earlier rows"] = f"of {many}, of parts drawn at random: an earlier report doesn't have them"
    return builder.build(clustering.centroids if clustering else None, facts)


def read_clustering(run: Run, manifest: Manifest) -> Clustering:
    """The centroids of a partition, and their features. Raises CorruptArtifact."""
    [name] = manifest.files
    return Clustering.from_bytes(run, run.read(CENTROIDS, name, manifest))


def finished_report(run: Run) -> Manifest | None:
    """The manifest of a whole report of today's partition; None if there is none."""
    try:
        manifest = run.finished(REPORT)
    except (CorruptArtifact, DriftError):
        return None
    return manifest if manifest and has_files(run, REPORT, manifest) else None


def commit_report(run: Run, built: Report) -> None:
    """Write a report's files and its manifest. A concurrent writer's finished report stays as it is."""
    invalidate(run, REPORT, lambda: finished_report(run))
    replaced = {} if finished_report(run) else _write(run, built.files)
    records = {name: FileRecord.of(data) for name, data in built.files.items()}
    manifest = run.commit_records(REPORT, records, built.info)
    for name, data in replaced.items():
        record = manifest.files.get(name)
        if record is not None and record.sha256 == sha256(data):
            run.store.write(f"{REPORT}/{name}", data)


def _write(run: Run, files: dict[str, bytes]) -> dict[str, bytes]:
    """Write a report's files; the other bytes that were replaced, by name: maybe of a writer that finishes first."""
    replaced = {}
    for name, data in files.items():
        key = f"{REPORT}/{name}"
        if run.store.create(key, data):
            continue
        stored = run.store.read(key)
        if stored != data:
            run.store.write(key, data)
            replaced[name] = stored
    return replaced
