"""The `ddm` command: one verb a stage, parse -> Run -> stage. Heavy imports wait until a verb needs them."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ddm_ray import __version__
from ddm_ray.errors import ConfigError, DDMError

RECIPE_HELP = "A shipped recipe (digits, tiny) or the path of a .yaml file."
SET_HELP = "Change a field of the recipe, e.g. --set expert.train.steps=500. May be given many times."


class OneLineErrors(click.Group):
    """Prints a user's mistake as one line on stderr and exits 1, without a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except DDMError as error:
            click.echo(f"error: {error}", err=True)
        except OSError as error:
            click.echo(f"error: {error.filename or 'storage'}: {error.strerror or error}", err=True)
        except ModuleNotFoundError as error:
            click.echo(f"error: this needs {error.name}; install it with: pip install 'ddm-ray[all]'", err=True)
        except KeyboardInterrupt:
            click.echo("\nstopped; the same command goes on from where it was", err=True)
            ctx.exit(130)
        ctx.exit(1)


class RunUrl(click.ParamType):
    """A run's folder or URI. A job on another machine is told where storage is, not where it stands itself."""

    name = "run"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not value:
            raise ConfigError("RUN is empty; name a folder or a URI")
        value = os.path.expanduser(value)
        submitted = "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ
        if submitted and "://" not in value and not Path(value).is_absolute():
            raise ConfigError(f"RUN {value!r} is relative; a submitted job needs an absolute path or a URI")
        return value


RUN = click.argument("run_url", metavar="RUN", type=RunUrl())
ISLANDS = click.option("--islands", metavar="FILE", help="islands.yaml that says where and how to train.")
ISLAND = click.option("--island", metavar="NAME", help="Which island of that file this is.")
ADDRESS = click.option("--address", metavar="RAY", help="Ray to use. Default: $RAY_ADDRESS, else a private one.")


@click.group(cls=OneLineErrors, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ddm")
def main() -> None:
    """Train one diffusion model on computers that never talk to each other, and serve it.

    A RUN is a folder or URI that all stages read from and write to. Every verb can be repeated: what is finished
    is left alone, what was interrupted goes on.

    \b
      ddm demo                                        the whole way on this computer
      ddm init runs/digits --recipe digits            begin a run of your own
      ddm prepare runs/digits                         read, decode and embed the images
      ddm partition runs/digits                       cluster them into one shard an expert
      ddm train runs/digits expert 0                  train one expert, anywhere
      ddm train runs/digits router                    train the router
      ddm sample runs/digits --class 3 -o three.png   draw images from the mixture
      ddm serve runs/digits                           serve it over HTTP
    """


def _make(run_url: str, artifact: str, stage: Callable[[Any, Any], None]) -> Any:
    """Run `stage(run, report)` under a live view unless the artifact is finished, and say what it holds."""
    from functools import partial

    from ddm_ray.progress import LiveView
    from ddm_ray.storage.run import Run
    from ddm_ray.storage.status import describe, status

    run = Run.open(run_url)
    if not run.finished(artifact):
        with LiveView(f"ddm: {run.url}", [artifact]) as view:
            view.show(artifact, 0.0, "starting")
            stage(run, partial(view.stage, artifact))
            view.stage(artifact, 1.0)
    click.echo(f"{artifact}: {describe(status(run, artifact))}")
    return run


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

    _make(run_url, "rows", stage)
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

    _make(run_url, "partition", stage)
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

    _make(run_url, artifact, stage)


@main.command()
@RUN
@click.option(
    "-c",
    "--class",
    "classes",
    multiple=True,
    metavar="NAME",
    help="Class of the images; many: one each. Default: all.",
)
@click.option("-n", "--num", default=4, show_default=True, type=click.IntRange(1), help="Images a class.")
@click.option("--strategy", help="once, full, top-1, top-2 ... Default: the run's.")
@click.option("--steps", type=int, help="Solver steps. Default: the run's.")
@click.option("--guidance", type=float, help="Guidance scale; 1 is none. Default: the run's.")
@click.option("--seed", default=0, show_default=True, help="Seed of the first image; the next ones count up.")
@click.option("--monolith", is_flag=True, help="Draw from the monolith instead.")
@click.option("-o", "--out", default="samples.png", show_default=True, type=click.Path(dir_okay=False))
def sample(
    run_url: str,
    classes: tuple[str, ...],
    num: int,
    strategy: str | None,
    steps: int | None,
    guidance: float | None,
    seed: int,
    monolith: bool,
    out: str,
) -> None:
    """Draw images from the finished mixture into one picture, a row a class. Needs neither Ray nor a GPU.

    \b
      ddm sample runs/digits
      ddm sample runs/digits --class 3 --num 8 --strategy full --guidance 1.5 -o threes.png
    """
    if not out.endswith(".png") or not Path(out).parent.is_dir():
        raise ConfigError(f"--out {out}: name a .png file in a folder that exists")
    from torch import Tensor

    from ddm_ray.evaluate.grid import GridRow, grid
    from ddm_ray.pipeline import DDMPipeline
    from ddm_ray.storage.run import Run

    run = Run.open(run_url)
    pipeline = DDMPipeline.from_run(run, model="monolith" if monolith else "mixture")
    names = classes or run.config.data.class_names
    labels = [name for name in names for _ in range(num)]
    seeds = range(seed, seed + len(labels))
    images_BCHW = pipeline(labels, steps, guidance, strategy, seeds=seeds, output_type="pt").images
    assert isinstance(images_BCHW, Tensor)
    rows = [GridRow(name, 2 * images_BCHW[i * num : (i + 1) * num] - 1) for i, name in enumerate(names)]
    grid(rows).save(out)
    click.echo(f"{out}: {len(labels)} images, seeds {seed} to {seed + len(labels) - 1}")


@main.command()
@RUN
@click.option("--name", default="default", show_default=True, help="Name of the evaluation, its folder below RUN/eval.")
def evaluate(run_url: str, name: str) -> None:
    """Compare the mixture's sampling strategies with the monolith: a report, a picture, metrics as JSON.

    \b
      ddm evaluate runs/digits
    """

    def stage(run: Any, report: Any) -> None:
        from ddm_ray.evaluate.run import evaluate as go

        go(run, name, report)

    from ddm_ray.storage.run import evaluation

    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ConfigError(f"--name {name!r}: use letters, digits, dots, dashes and underscores")
    _show_evaluation(_make(run_url, evaluation(name), stage), name)


def _show_evaluation(run: Any, name: str) -> None:
    from ddm_ray.evaluate.report import print_table
    from ddm_ray.evaluate.run import read_metrics
    from ddm_ray.storage.run import evaluation

    click.echo(print_table(read_metrics(run, name)))
    for file in ("report.html", "grid.png", "metrics.json"):
        click.echo(f"{run.url}/{evaluation(name)}/{file}")


@main.command()
@RUN
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", default=8000, show_default=True, type=click.IntRange(1, 65535))
@ADDRESS
def serve(run_url: str, host: str, port: int, address: str | None) -> None:
    """Serve the finished mixture over HTTP with OpenAI's POST /v1/images/generations, until Ctrl-C.

    \b
      ddm serve runs/digits --port 8000
      curl -s localhost:8000/v1/images/generations -H 'content-type: application/json' \\
           -d '{"prompt": "7", "seed": 1, "response_format": "png"}' -o seven.png
    """
    from ddm_ray.serve.app import serve_run
    from ddm_ray.storage.run import Run

    run = Run.open(run_url)
    click.echo("starting Ray and Serve ...")
    serve_run(run.url, port, host, address)


@main.command()
@RUN
def status(run_url: str) -> None:
    """Show what of RUN is finished, begun or waiting, from storage alone: asks no Ray and no other machine.

    \b
      ddm status runs/digits
    """
    from ddm_ray.storage.run import Run
    from ddm_ray.storage.status import describe, survey

    run = Run.open(run_url)
    click.echo(f"run {run.config.name!r} at {run.url}")
    for found in survey(run):
        click.echo(f"  {found.artifact:<14} {found.state:<9} {found.fraction:4.0%}  {describe(found)}")


@main.command()
@click.option("--run", "run_url", default=None, metavar="RUN", help="Folder of the run. Default: runs/RECIPE.")
@click.option("--recipe", default="digits", show_default=True, metavar="NAME", help=RECIPE_HELP)
@click.option("--set", "settings", multiple=True, metavar="A.B=C", help=SET_HELP)
def demo(run_url: str | None, recipe: str, settings: tuple[str, ...]) -> None:
    """Go the whole way on this computer: real images, experts, monolith, router, samples, a report.

    Takes minutes on two cores, needs no GPU and no network. Stop it whenever you like; the same command goes on.

    \b
      ddm demo
      ddm demo --run runs/mine --set partition.num_clusters=8
    """
    from ddm_ray.demo import NAME
    from ddm_ray.demo import demo as go

    folder = run_url or f"runs/{Path(recipe).stem}"
    run = go(folder, recipe, settings)
    _show_evaluation(run, NAME)
    click.echo("\nnext:")
    for command in (f"sample {folder} --class 3", f"serve {folder}", f"status {folder}", "--help"):
        click.echo(f"  ddm {command}")
