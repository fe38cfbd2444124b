"""Verbs that look at a run and use it: sample, evaluate, export, serve, status, demo."""

import re
from pathlib import Path
from typing import Any

import click

from ddm_ray.cli.command import ADDRESS, RECIPE_HELP, RUN, SET_HELP, main, make
from ddm_ray.errors import ConfigError


@main.command()
@RUN
@click.option(
    "-c",
    "--class",
    "classes",
    multiple=True,
    metavar="NAME",
    help="Class of the images, or its number if classes have no names; many: one each. Default: all that have one.",
)
@click.option("-p", "--prompt", "prompts", multiple=True, metavar="TEXT", help="Instead of classes: texts to paint.")
@click.option("-n", "--num", default=4, show_default=True, type=click.IntRange(1), help="Images a class or prompt.")
@click.option("--strategy", help="once, full, top-2, nucleus-0.9 ... Default: the run's.")
@click.option("--steps", type=int, help="Solver steps. Default: the run's.")
@click.option("--guidance", type=float, help="Guidance scale; 1 is none. Default: the run's.")
@click.option("--seed", default=0, show_default=True, help="Seed of the first image; the next ones count up.")
@click.option("--monolith", is_flag=True, help="Draw from the monolith instead.")
@click.option("-o", "--out", default="samples.png", show_default=True, type=click.Path(dir_okay=False))
@click.option("--trace", metavar="FILE", help="Also draw which expert painted which image, step by step, to a .png.")
def sample(
    run_url: str,
    classes: tuple[str, ...],
    prompts: tuple[str, ...],
    num: int,
    strategy: str | None,
    steps: int | None,
    guidance: float | None,
    seed: int,
    monolith: bool,
    out: str,
    trace: str | None,
) -> None:
    """Draw images from the finished mixture into one picture, a row a class. Needs neither Ray nor a GPU.

    RUN may also be a folder that `ddm export` wrote, or a checkpoint in Paris's layout.

    \b
      ddm sample runs/digits
      ddm sample runs/digits --class 3 --num 8 --strategy full --guidance 1.5 -o threes.png --trace experts.png
      ddm sample exported --class 3
    """
    for option, file in (("--out", out), ("--trace", trace)):
        if file is not None and (not file.endswith(".png") or not Path(file).parent.is_dir()):
            raise ConfigError(f"{option} {file}: name a .png file in a folder that exists")
    if classes and prompts:
        raise ConfigError("--class and --prompt are both given: use one")
    if trace is not None and Path(trace).resolve() == Path(out).resolve():
        raise ConfigError(f"--trace and --out are both {out}: name two files")
    from torch import Tensor

    from ddm_ray.pipeline import DDMPipeline
    from ddm_ray.sampling.grid import GridRow, grid
    from ddm_ray.sampling.trace import require_matplotlib

    if trace is not None:
        require_matplotlib()

    if (Path(run_url) / "model_index.json").is_file():
        if monolith:
            raise ConfigError(f"--monolith: {run_url} is an exported mixture, it has no monolith")
        pipeline = DDMPipeline.from_pretrained(run_url)
    else:
        pipeline = DDMPipeline.from_run(run_url, model="monolith" if monolith else "mixture")
    names, asked = _asked(pipeline, run_url, classes, prompts)
    wanted = [one for one in asked for _ in range(num)]
    asked_for: dict[str, Any] = {"prompt" if pipeline.models.info.num_classes is None else "class_labels": wanted}
    output = pipeline(
        **asked_for,
        num_inference_steps=steps,
        guidance_scale=guidance,
        strategy=strategy,
        seeds=range(seed, seed + len(wanted)),
        output_type="pt",
    )
    assert isinstance(output.images, Tensor)
    rows = [GridRow(name, 2 * output.images[i * num : (i + 1) * num] - 1) for i, name in enumerate(names)]
    grid(rows).save(out)
    click.echo(f"{out}: {len(wanted)} images, seeds {seed} to {seed + len(wanted) - 1}")
    if trace is not None:
        output.plot_routing(trace)
        click.echo(f"{trace}: which expert painted them, step by step")


def _asked(
    pipeline: Any, run_url: str, classes: tuple[str, ...], prompts: tuple[str, ...]
) -> tuple[list[str], list[Any]]:
    """What to write beside each row of images, and what to ask the pipeline for: texts, or labels."""
    num_classes, known = pipeline.models.info.num_classes, pipeline.components.class_names
    if num_classes is None:
        if classes:
            raise ConfigError(f"--class: {run_url} is conditioned on texts; use --prompt")
        if not prompts:
            raise ConfigError(f"{run_url} is conditioned on texts: say what to paint with --prompt")
        return list(prompts), list(prompts)
    if num_classes == 0:
        if classes or prompts:
            raise ConfigError(f"{run_url} has neither classes nor texts: leave out --class and --prompt")
        return ["any"], [None]
    names = list(prompts or classes or known)
    if not names:
        raise ConfigError(f"{run_url} has classes without names: say which with --class, from 0 to {num_classes - 1}")
    return names, names if known else [int(name) if name.isdecimal() else name for name in names]


@main.command()
@RUN
@click.argument("folder", type=click.Path(file_okay=False))
@click.option("--overwrite", is_flag=True, help="Replace what an earlier export left in FOLDER.")
def export(run_url: str, folder: str, overwrite: bool) -> None:
    """Write the finished mixture to FOLDER in the layout of diffusers pipelines: one folder a component.

    It needs nothing of the run afterwards: `ddm sample FOLDER`, or DDMPipeline.from_pretrained(FOLDER).

    \b
      ddm export runs/digits exported
    """
    from ddm_ray.pipeline import DDMPipeline
    from ddm_ray.sampling.pretrained import require_free

    require_free(folder, overwrite, "--overwrite")
    DDMPipeline.from_run(run_url).save_pretrained(folder, overwrite=overwrite)
    click.echo(f"{folder}: model_index.json and one folder a component; next: ddm sample {folder}")


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
    _show_evaluation(make(run_url, evaluation(name), stage), name)


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
    """Show what of RUN is finished, begun, failed or waiting, from storage alone: asks no Ray and no other machine.

    A job that failed says why, and which command goes on. One that has given no sign for 10 seconds is called silent.

    \b
      ddm status runs/digits
    """
    from ddm_ray.storage.run import Run
    from ddm_ray.storage.status import line, survey

    run = Run.open(run_url)
    click.echo(f"run {run.config.name!r} at {run.url}")
    for found in survey(run):
        click.echo(f"  {line(found)}")


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
