"""The verb that measures a run's models, and the display of an evaluation."""

import re
from contextlib import suppress
from functools import partial
from typing import Any

import click

from ddm_ray.cli.command import ADDRESS, ISLAND, ISLANDS, RUN, main, make, say, warn
from ddm_ray.cli.devices import DEVICE, device_of
from ddm_ray.cli.fixes import ddm_line
from ddm_ray.errors import ConfigError, DriftError
from ddm_ray.run.graph import NAME_PATTERN, Artifact


@main.command()
@RUN
@click.option("--name", default="default", show_default=True, help="Name of the evaluation: its folder below RUN/eval.")
@click.option(
    "--at",
    type=click.IntRange(1),
    metavar="STEP",
    help="Measure each model by its newest weights up to this step. Default: the newest weights.",
)
@DEVICE
@click.option("--ray", "on_ray", is_flag=True, help="Sample on a Ray cluster: --address, or the island's.")
@ISLANDS
@ISLAND
@ADDRESS
def evaluate(
    run_url: str,
    name: str,
    at: int | None,
    device: str,
    on_ray: bool,
    islands: str | None,
    island: str | None,
    address: str | None,
) -> None:
    """Compare the mixture's sampling strategies with monolith and student: a report, a picture, and metrics as JSON.

    Every expert must have published weights. Router, monolith and student are measured if they exist, and named
    otherwise. A model that still trains is measured by its newest weights. Evaluations of one run with different --at
    show its progress (`ddm compare RUN@NAME ...` plots them over FLOPs). Once everything is finished, the run samples
    with the best strategy, unless its recipe names one. This process makes the samples, or with --ray a cluster, by one
    actor per GPU if the island has GPUs. You may kill this command at any moment; the same command continues.

    \b
      ddm evaluate runs/digits
      ddm evaluate runs/digits --name early --at 400
      ddm evaluate s3://lab/run7 --name large --ray --islands islands.yaml --island room-2
    """
    from ddm_ray.placement import load_island
    from ddm_ray.run.graph import PARTITION, evaluation

    if not on_ray and (islands or island or address):
        raise ConfigError("--islands, --island and --address say where Ray samples: add --ray, or leave them out")
    site = load_island(islands, island)

    def stage(run: Any, report: Any) -> None:
        run.require(PARTITION)
        from ddm_ray.evaluate import run as evaluating

        measured_on = device_of(device)
        if not on_ray:
            evaluating.evaluate(run, name, report, measured_on, at=at)
            return
        from ddm_ray.data.sharded.ray_data import RayData
        from ddm_ray.ray_session import ray_session

        ray_data = RayData(site.prepare, partial(ray_session, *site.ray(address)))
        made_on = "cuda" if site.prepare.use_gpu else "cpu"
        evaluating.evaluate(run, name, report, measured_on, ray_data, made_on, at)

    if not re.fullmatch(NAME_PATTERN, name):
        raise ConfigError(f"--name {name!r}: use letters, digits, dots, dashes and underscores")
    show_evaluation(make(run_url, evaluation(name), stage), name)


def _is_finished(run: Any, artifact: Artifact) -> bool:
    with suppress(DriftError):  # the report says so
        return run.finished(artifact, accepted=True) is not None
    return False


def show_evaluation(run: Any, name: str) -> None:
    """Print the table of a finished evaluation, warnings, and the paths of its files."""
    from ddm_ray.evaluate.report import report_table
    from ddm_ray.evaluate.run import read_metrics
    from ddm_ray.run.graph import evaluation

    metrics = read_metrics(run, name)
    for text in report_table(metrics).split("\n"):
        say(text)
    again = ddm_line("evaluate", run.url, "--name", "ANOTHER")
    if since := [lacked for lacked in metrics.get("missing", {}) if _is_finished(run, Artifact(lacked))]:
        warn(f"{', '.join(since)}: finished since; `{again}` measures it")
    if begun := [artifact for artifact in metrics.get("milestones", {}) if _is_finished(run, Artifact(artifact))]:
        warn(f"{', '.join(begun)}: measured by earlier weights; `{again}` measures them as they are")
    for file in ("report.html", "mixture.png", "grid.png", "metrics.json"):
        say(f"{run.url}/{evaluation(name)}/{file}")
