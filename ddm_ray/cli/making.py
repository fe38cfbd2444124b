"""Verbs that make a run's artifacts: init, prepare, partition, train."""

from typing import Any

import click

from ddm_ray.cli.command import ADDRESS, ISLAND, ISLANDS, RECIPE_HELP, RUN, SET_HELP, main, make
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
@ADDRESS
def prepare(run_url: str, address: str | None) -> None:
    """Read the source's images, decode and embed them with Ray Data, and write RUN/rows.

    \b
      ddm prepare runs/digits
    """

    def stage(run: Any, report: Any) -> None:
        from ddm_ray.data.prepare import prepare as go
        from ddm_ray.ray_session import ray_session

        with ray_session(address):
            go(run, report)

    make(run_url, "rows", stage)
    click.echo(f"next: ddm partition {run_url}")


@main.command()
@RUN
def partition(run_url: str) -> None:
    """Cluster the embeddings (fine, then coarse k-means) and write one shard of rows an expert.

    \b
      ddm partition runs/digits
    """

    def stage(run: Any, report: Any) -> None:
        from ddm_ray.data.partition import partition as go

        go(run, report)

    make(run_url, "partition", stage)
    click.echo(f"next: ddm train {run_url} expert 0")


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
