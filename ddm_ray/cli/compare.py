"""The verb that compares finished evaluations of several runs."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import click
from pydantic import ValidationError

from ddm_ray.cli.command import main, progress, say
from ddm_ray.cli.fixes import ddm_line
from ddm_ray.errors import ConfigError
from ddm_ray.spelling import shell_line

if TYPE_CHECKING:
    from ddm_ray.config import EmbedderConfig
    from ddm_ray.run.run import Run


@main.command()
@click.argument("sides", nargs=-1, required=True, metavar="RUN[@EVALUATION]...")
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="NAME",
    help="monolith, student, once ...; repeatable, in the order wanted. Default: all.",
)
@click.option(
    "--features",
    metavar="MAPPING",
    help="Network that computes the features, written as in evaluate.features. Default: the first run's.",
)
@click.option("--output", default="compare.html", show_default=True, metavar="FILE", help="The page.")
@click.option("--json", "as_json", metavar="FILE", help="Also write all numbers here, as JSON.")
def compare(
    sides: tuple[str, ...], models: tuple[str, ...], features: str | None, output: str, as_json: str | None
) -> None:
    """Compare models of several runs, or evaluations of one run: a table, a page, and differences with intervals.

    The images are those of `ddm evaluate`; nothing is sampled. All models are measured again with the same features,
    the same number of images, and the first run's real rows. Each line is compared with the first line. Models that
    were sampled from the same labels and seeds are compared image by image. Runs must have the same data. The name of
    an evaluation may be left out if a run has only one.

    \b
      ddm compare runs/k4 runs/k8 --model monolith --model once
      ddm compare runs/digits@before runs/digits@after --output after.html
      ddm compare runs/k8 --features '{kind: timm, model: vit_small_patch14_dinov2.lvd142m}'
    """
    for path in filter(None, (output, as_json)):
        if Path(path).is_dir():
            raise ConfigError(f"{path}: is a folder; name a file")
        if not Path(path).absolute().parent.is_dir():
            raise ConfigError(f"{path}: there is no folder {Path(path).parent}")
    network = _features(features) if features is not None else None
    named = _sides(sides)
    from ddm_ray.evaluate.compare import Side
    from ddm_ray.evaluate.compare import compare as compared
    from ddm_ray.evaluate.compare_report import comparison_table, render_comparison
    from ddm_ray.pictures.files import whole_file

    evaluations = [Side(*each) for each in named]
    with progress(output, "compare") as report:
        comparison = compared(evaluations, models, report, features=network)
    for text in comparison_table(comparison).split("\n"):
        say(text)
    pages = [(output, render_comparison(comparison))]
    pages += [(as_json, json.dumps(comparison.as_json(), indent=1) + "\n")] if as_json else []
    for path, text in pages:
        with whole_file(path) as unfinished:
            unfinished.write_text(text)
        say(path)


def _features(text: str) -> "EmbedderConfig":
    """The network that a mapping of the command line names."""
    from ddm_ray.config import EvaluateConfig, invalid_fields, read_yaml

    where = f"--features {text}"
    try:
        kind = EvaluateConfig.model_fields["features"].annotation
        network = EvaluateConfig(features=read_yaml(text, where, kind)).features
    except ValidationError as error:
        raise ConfigError(f"{where}: {invalid_fields(error)}") from None
    if network is None:
        raise ConfigError(f"{where}: names no network")
    return network


def _sides(texts: tuple[str, ...]) -> "list[tuple[Run, str, str]]":
    """The named evaluations, which are finished: run, name, and the shortest name that is unique."""
    from ddm_ray.run.graph import NAME_PATTERN, evaluation
    from ddm_ray.run.inventory import evaluations
    from ddm_ray.run.run import Run

    named: list[tuple[Run, str]] = []
    for text in texts:
        url, at, name = text.rpartition("@")
        if at and not re.fullmatch(NAME_PATTERN, name):
            raise ConfigError(f"{text}: {name!r} isn't the name of an evaluation")
        run = Run.open(url if at else text)
        if not at:
            finished = [str(each.name) for each in evaluations(run) if run.manifest(each)]
            if len(finished) != 1:
                way_out = f"has none; make one with: {ddm_line('evaluate', text)}"
                if finished:
                    way_out = f"has several: name one as {shell_line(f'{text}@{finished[0]}')}"
                raise ConfigError(f"{text}: which evaluation? It {way_out}")
            (name,) = finished
        run.require(evaluation(name))
        named.append((run, name))
    if len({(run.url, name) for run, name in named}) < len(named):
        raise ConfigError("the same evaluation is named twice")
    runs = {run.url for run, _ in named}
    last = [run.url.rpartition("/")[2] for run, _ in named]
    bases = last if len({*last}) == len(runs) else [run.url for run, _ in named]
    if len(runs) == 1:
        return [(run, name, name) for run, name in named]
    alone = len(runs) == len(named)
    return [(run, name, base if alone else f"{base}@{name}") for (run, name), base in zip(named, bases, strict=True)]
