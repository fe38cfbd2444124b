"""Verbs that make a run's data: prepare, partition."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import click

from ddm_ray.cli.command import (
    ADDRESS,
    ISLAND,
    ISLANDS,
    RUN,
    Between,
    main,
    make,
    ray_with_scratch,
    say,
    spill_folder,
    warn,
)
from ddm_ray.cli.devices import GPU, placed, require_gpu, tell_of_workers
from ddm_ray.cli.fixes import ddm_line
from ddm_ray.run.graph import Artifact, rows_of
from ddm_ray.run.info import ClusterFit, ReportInfo, RowsInfo


@main.command()
@RUN
@GPU
@ISLANDS
@ISLAND
@ADDRESS
@click.option(
    "--cluster", type=int, metavar="K", help="Only the images of this cluster: an owner's, or one's that joined."
)
@click.option("--source", metavar="URI", help="Images of that owner, instead of data.source.")
@click.option(
    "--max-rejected",
    type=Between(0, 1),
    default=0.05,
    show_default=True,
    metavar="SHARE",
    help="Stop if more than this share of the images can't be used.",
)
def prepare(
    run_url: str,
    gpu: bool | None,
    islands: str | None,
    island: str | None,
    address: str | None,
    cluster: int | None,
    source: str | None,
    max_rejected: float,
) -> None:
    """Read, decode, embed and encode the run's images with Ray Data, and write them to RUN/rows.

    `ddm init` names the images: a folder with one folder per class, WebDataset tars, or parquet files in the Hugging
    Face layout, on this disk, in a bucket or on the hub. Images that can't be used are left out, and RUN/rows/_rejected
    says why. You may kill this command at any moment; the same command continues.

    \b
      ddm init runs/birds --recipe images64 --set data.source=photos/birds --set data.num_classes=20
      ddm prepare runs/birds
    \b
      ddm init s3://lab/run7 --recipe laion256-k8 --set "data.source=s3://lab/train-{000..127}.tar"
      ddm prepare s3://lab/run7 --islands islands.yaml --island gpu-room
    \b
      ddm init runs/food --recipe images64 --set data.source=hf://datasets/OWNER/NAME --set data.num_classes=101
      ddm prepare runs/food
    \b
      ddm prepare study/run --cluster 2 --source scans       images of the owner of cluster 2

    With partition.method=given each owner of images has a cluster, and no image leaves its owner. RUN is then the
    owner's own folder, begun by the same `ddm init` as the others'. Only the shard's manifest is handed over.
    """
    from ddm_ray.data.prepare import stage as preparing
    from ddm_ray.placement import load_island
    from ddm_ray.run.run import Run

    run = Run.open(run_url)
    site = load_island(islands, island)
    placement = placed(site.prepare, gpu)
    one = cluster is not None or source is not None or run.config.partition.given
    artifacts = (preparing.rows_artifact(run, cluster),) if one else rows_of(run.config)

    @contextmanager
    def session() -> Iterator[None]:
        from ddm_ray.cores import usable_cores
        from ddm_ray.ray_session import cluster_total, ray_session

        ray_address, token_file = site.ray(address)
        if gpu:
            require_gpu(ray_address)
        with ray_session(ray_address, token_file, usable_cores()):
            tell_of_workers("embed", placement.use_gpu, cluster_total("GPU"))
            yield

    def stage(run: Any, report: Any, cluster: int | None) -> None:
        from ddm_ray.data.sharded.ray_data import RayData
        from ddm_ray.models.hub import require_hub

        if not (site.ray(address)[0] or os.environ.get("RAY_ADDRESS")):
            require_hub(run.config)  # machines of a cluster may reach the hub when this one can't
        # Ray starts only when there is something to make, so that mistakes are refused without it.
        ray_data = RayData(placement, session)
        preparing.prepare(run, report, placement, source, cluster, max_rejected, execute=ray_data)

    for artifact in artifacts:
        make(run_url, artifact, partial(stage, cluster=artifact.cluster), mends=True)
        _show_rows(run, artifact)
    owner = ("--cluster", str(cluster)) if run.config.partition.given else ()
    say(f"next: {ddm_line('partition', run_url, *owner)}")


def _show_rows(run: Any, artifact: Artifact) -> None:
    """Print which images were left out of the rows and why, and the names of labels."""
    from ddm_ray.data.prepare.records import REJECTED
    from ddm_ray.data.reasons import CUT
    from ddm_ray.data.sources.skipped import unread
    from ddm_ray.run.graph import ROWS

    info = RowsInfo.of(run.require(artifact))
    if info.rejected:
        where = f"{run.url}/{artifact}/{REJECTED}"
        say(f"{info.rejected} images can't be used and are left out; {where} says why")
        for reason in info.reasons:
            line = f"{reason.rows:>8} {reason.reason}, e.g. {reason.id}"
            if reason.reason.startswith(CUT):
                warn(line.strip())
            else:
                say(line)
        if others := info.rejected - sum(reason.rows for reason in info.reasons):
            say(f"{others:>8} for other reasons")
    for loss in info.losses:
        warn(f"{loss.rows} images are used that lost something: {loss.reason}, e.g. {loss.id}")
    for show, lines in zip((say, warn), unread(info.ignored), strict=True):
        for line in lines:
            show(line)
    if not info.rows_heldout and artifact == ROWS:
        none = "neither training nor evaluation will have held-out losses"
        warn(f"no row is held out (data.heldout {run.config.data.heldout}): {none}")
    if info.classes:
        names = [f"{label} {name}" for label, name in enumerate(info.classes)]
        say(f"classes: {', '.join(names[:10])}{', ...' if names[10:] else ''}")
    if info.duplicates:
        what = "left out" if info.dropped else "kept; data.duplicates=drop would leave them out"
        say(f"{info.duplicates} images are byte by byte equal to an earlier one: {what}")


@main.command()
@RUN
@click.option("--cluster", type=int, metavar="K", help="Make the shard of this owner only, if owners are clusters.")
@click.option(
    "--scratch",
    type=click.Path(exists=True, file_okay=False, writable=True),
    metavar="FOLDER",
    help="Existing folder on this computer with room for all shards, for a private Ray. Default: a temporary one.",
)
@ISLANDS
@ISLAND
@ADDRESS
def partition(
    run_url: str,
    cluster: int | None,
    scratch: str | None,
    islands: str | None,
    island: str | None,
    address: str | None,
) -> None:
    """Cluster the embeddings by two levels of k-means, and write one shard of rows per expert and a report.

    Look at RUN/partition/report/report.html before you train, since each cluster becomes an expert. With
    partition.method=given each owner first makes its own shard (--cluster). Then a person with all shards' manifests
    makes the partition.

    \b
      ddm partition runs/digits
      ddm partition s3://lab/run7 --scratch /mnt/nvme
      ddm partition s3://lab/run7 --islands islands.yaml --island gpu-room
      ddm partition study/run --cluster 2

    Ray sorts the rows. On this computer it needs a disk with room for all of them; with --island or --address it uses
    a cluster, where each machine holds a share. You may kill this command at any moment; the same command continues.
    """
    from ddm_ray.data.prepare.stage import rows_artifact
    from ddm_ray.placement import load_island
    from ddm_ray.run.graph import PARTITION, REPORT, shard
    from ddm_ray.run.run import Run

    site = load_island(islands, island)
    ray_address, token_file = site.ray(address)
    spills_below = spill_folder(ray_address, scratch)
    if cluster is not None:
        rows_artifact(Run.open(run_url), cluster)
    session = ray_with_scratch(ray_address, token_file, spills_below)  # starts only when there is something to make

    def stage(run: Any, report: Any) -> None:
        from ddm_ray.data.partition import stage as partitioning
        from ddm_ray.data.partition.ray_data import RayPasses

        partitioning.partition(run, report, cluster, execute=RayPasses(session, spills_below))

    artifact = PARTITION if cluster is None else shard(cluster)
    run = make(run_url, artifact, stage, mends=True)
    _begin_as_nearest(run)
    if cluster is None:
        if info := ReportInfo.of_either(run.manifest(REPORT), run.manifest(PARTITION)):
            if info.silhouette is not None:
                say(f"silhouette of the clusters: {info.silhouette:.3f} (1: far apart, 0: no borders)")
            for number, fit in enumerate(info.fit):
                say(f"cluster {number}: {_fit(fit)}")
            for warning in info.warnings:
                warn(warning)
        say(f"look at it: {run.url}/{REPORT}/report.html")
    models = ("all",) if cluster is None else ("expert", str(cluster))
    say(f"next: {ddm_line('train', run_url, *models)}")


def _begin_as_nearest(run: Any) -> None:
    """Copy the weights that new experts begin with, if these are to be those of the nearest cluster."""
    from ddm_ray.run.inputs import beginnings_of

    if not beginnings_of(run.config):
        return
    from ddm_ray.data.partition.groups import nearest_cluster
    from ddm_ray.sampling.initial_weights import copy_nearest, unfinished_nearest

    for job in unfinished_nearest(run):
        assert job.cluster is not None
        cluster = nearest_cluster(run, job.cluster)
        copy_nearest(run, job, cluster)
        say(f"expert {job.cluster} begins with the weights of expert {cluster}, the nearest one")


def _fit(fit: ClusterFit) -> str:
    """Words for the rows that were appended to a cluster."""
    far = "" if fit.far is None else f", {fit.far:,} of them farther from its centroid than 99 % of the earlier ones"
    return f"{fit.rows:,} new training rows{far}"
