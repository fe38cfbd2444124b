"""Verbs that make a run's artifacts: init, prepare, partition, train."""

from typing import Any

import click

from ddm_ray.cli.command import ADDRESS, ISLAND, ISLANDS, RECIPE_HELP, RUN, SET_HELP, main, make, warn
from ddm_ray.errors import ConfigError


@main.command()
@RUN
@click.option("--recipe", required=True, metavar="NAME", help=RECIPE_HELP)
@click.option("--set", "settings", multiple=True, metavar="A.B=C", help=SET_HELP)
def init(run_url: str, recipe: str, settings: tuple[str, ...]) -> None:
    """Begin a run: write RUN/run.json, which never changes afterwards.

    \b
      ddm init runs/digits --recipe digits
      ddm init s3://bucket/run7 --recipe my.yaml --set partition.num_clusters=8
    """
    from ddm_ray.config import load_recipe
    from ddm_ray.storage.run import Run

    run = Run.create(run_url, load_recipe(recipe, settings))
    click.echo(f"run {run.config.name!r} at {run.url}; next: ddm prepare {run_url}")


@main.command()
@RUN
@ISLANDS
@ISLAND
@ADDRESS
@click.option("--cluster", type=int, metavar="K", help="Whose rows, where shards are given (partition.method given).")
@click.option("--source", metavar="URI", help="That owner's images, in place of data.source.")
@click.option(
    "--max-rejected",
    type=click.FloatRange(0, 1),
    default=0.05,
    show_default=True,
    metavar="SHARE",
    help="Stop if more than this share of the images can't be used.",
)
def prepare(
    run_url: str,
    islands: str | None,
    island: str | None,
    address: str | None,
    cluster: int | None,
    source: str | None,
    max_rejected: float,
) -> None:
    """Read the source's images, decode, embed and encode them with Ray Data, and write RUN/rows.

    What the images are is said when the run begins: a folder with one folder a class, WebDataset tars, parquet in the
    Hugging Face layout; here, in a bucket or on the hub. Killed at any moment, the same command goes on. An image
    that can't be used is left out, with its reason in RUN/rows/_rejected.

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
      ddm prepare study/run --cluster 2 --source scans       one owner's part, where shards are given

    Where shards are given, RUN is the owner's own folder, begun by the same `ddm init` as everyone's: rows and shard
    are written there, and only the shard's manifest is handed over.
    """
    from ddm_ray.data.parts import Parts, rows_artifact, source_of
    from ddm_ray.placement import load_placement
    from ddm_ray.storage.run import Run

    run = Run.open(run_url)
    placement = load_placement(islands, island)
    artifact = rows_artifact(run, cluster)
    source_of(Parts(run, artifact), source, cluster)  # refuses what it can before Ray is started

    def stage(run: Any, report: Any) -> None:
        from ddm_ray.data.prepare import prepare as go
        from ddm_ray.ray_session import ray_session

        with ray_session(address or placement.address):
            go(run, report, placement, source, cluster, max_rejected)

    make(run_url, artifact, stage)
    _tell_rows(run, artifact)
    click.echo(f"next: ddm partition {run_url}" + (f" --cluster {cluster}" if cluster is not None else ""))


def _tell_rows(run: Any, artifact: str) -> None:
    """What a finished artifact of rows left out and why, and what its labels mean."""
    from ddm_ray.data.parts import REJECTED
    from ddm_ray.data.reasons import CUT
    from ddm_ray.storage.run import ROWS

    info = run.require(artifact).info
    if info["rejected"]:
        where = f"{run.url}/{artifact}/{REJECTED}"
        click.echo(f"{info['rejected']} images can't be used and are left out; each one's reason is in {where}")
        for reason in info["reasons"]:
            line = f"{reason['rows']:>8} {reason['reason']}, e.g. {reason['id']}"
            if reason["reason"].startswith(CUT):
                warn(line.strip())
            else:
                click.echo(line)
        if others := info["rejected"] - sum(reason["rows"] for reason in info["reasons"]):
            click.echo(f"{others:>8} for other reasons")
    if info["ignored"]:
        counts = sorted(info["ignored"].items(), key=lambda ending: -ending[1])
        endings = ", ".join(f"{count} {ending}" for ending, count in counts)
        warn(f"{sum(info['ignored'].values())} files are of another kind and aren't read: {endings}")
    if not info["rows_heldout"] and artifact == ROWS:
        warn(f"no row is held out (data.heldout {run.config.data.heldout}): evaluation will have no held-out losses")
    if info["classes"]:
        names = [f"{label} {name}" for label, name in enumerate(info["classes"])]
        click.echo(f"classes by folder: {', '.join(names[:10])}{', ...' if names[10:] else ''}")
    if info["duplicates"]:
        what = "left out" if info["dropped"] else "kept; data.duplicates=drop would leave them out"
        click.echo(f"{info['duplicates']} images equal an earlier one byte by byte: {what}")


@main.command()
@RUN
@click.option("--cluster", type=int, metavar="K", help="Make this owner's shard alone (partition.method given).")
@click.option(
    "--scratch",
    metavar="FOLDER",
    help="A local folder with room for all shards, which exists. Default: a temporary one.",
)
def partition(run_url: str, cluster: int | None, scratch: str | None) -> None:
    """Cluster the embeddings (fine, then coarse k-means) and write one shard of rows an expert, and a report.

    Look at RUN/partition/report/report.html before you train: clusters become experts. Where shards are given, each
    owner makes its own from its own rows, and then anyone who sees their manifests the partition.

    \b
      ddm partition runs/digits
      ddm partition s3://lab/run7 --scratch /mnt/nvme
      ddm partition study/run --cluster 2
    """
    from ddm_ray.data import REPORT
    from ddm_ray.storage.run import PARTITION, shard

    def stage(run: Any, report: Any) -> None:
        from ddm_ray.data.partition import partition as go

        go(run, report, cluster, scratch)

    artifact = PARTITION if cluster is None else shard(cluster)
    run = make(run_url, artifact, stage, mends=True)
    if cluster is None:
        for warning in run.require(PARTITION).info["warnings"]:
            warn(warning)
        click.echo(f"look at it: {run.url}/{PARTITION}/{REPORT}/report.html")
    click.echo(f"next: ddm train {run_url} expert {cluster or 0}")


@main.command()
@RUN
@click.argument("what", type=click.Choice(["expert", "router", "monolith"]))
@click.argument("index", type=int, required=False)
@ISLANDS
@ISLAND
@ADDRESS
def train(
    run_url: str, what: str, index: int | None, islands: str | None, island: str | None, address: str | None
) -> None:
    """Train one model of RUN: `expert INDEX`, the `router`, or the `monolith` they are measured against.

    Needs only run.json and the model's own shard. Killed at any moment, the same command goes on from the last
    saved state; run twice at once, the newest attempt counts.

    \b
      ddm train runs/digits expert 0
      ddm train runs/digits router
      ddm train s3://bucket/run7 expert 3 --islands islands.yaml --island room-2
    """
    from ddm_ray.placement import load_placement
    from ddm_ray.storage.run import Run, expert

    run = Run.open(run_url)
    placement = load_placement(islands, island)
    if (what == "expert") != (index is not None):
        raise ConfigError(f"train {what}: " + ("which one? e.g. expert 0" if what == "expert" else "takes no INDEX"))
    if index is not None and not 0 <= index < len(run.experts):
        raise ConfigError(f"train expert {index}: this run has experts 0 to {len(run.experts) - 1}")
    artifact = expert(index) if index is not None else what

    def stage(run: Any, report: Any) -> None:
        for needed in run.inputs(artifact):
            run.require(needed)
        from ddm_ray.ray_session import ray_session
        from ddm_ray.storage.status import describe, status
        from ddm_ray.train.launch import train_all

        def watch() -> None:
            found = status(run, artifact)
            if found.state != "waiting":
                report(found.fraction, describe(found))

        report(0.0, "starting a training worker")

        with ray_session(address or placement.address) as private:
            train_all(run, [artifact], placement, watch, may_grow=not private)

    make(run_url, artifact, stage)
