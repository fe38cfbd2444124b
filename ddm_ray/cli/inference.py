"""Verbs that use a finished mixture: sample and export."""

import os
import re
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ddm_ray.cli.before_sampling import MAX_IMAGES, MAX_SEED, conditions_of, counts_of, require_settings, sampled_run
from ddm_ray.cli.command import RUN, OneOf, main, progress, say
from ddm_ray.cli.devices import DEVICE, device_of
from ddm_ray.cli.field_options import FieldsCommand
from ddm_ray.cli.fixes import ddm_line
from ddm_ray.cli.step_bar import StepBar
from ddm_ray.data import OnProgress, phase
from ddm_ray.errors import ConfigError
from ddm_ray.run.graph import EXTRAS

if TYPE_CHECKING:
    from PIL.Image import Image

    from ddm_ray.pipeline import DDMPipeline
    from ddm_ray.run.run import Run

LOADING = "loading networks"
PER_CLASS = 4
"""Default number of images of a class or prompt."""


@main.command(cls=FieldsCommand, model="ddm_ray.config:SamplingSettings")
@RUN
@click.option(
    "-c",
    "--class",
    "classes",
    multiple=True,
    metavar="NAME",
    help="Class of the images, or its number; may be given many times. Default: all classes that have names.",
)
@click.option(
    "-p",
    "--prompt",
    "prompts",
    multiple=True,
    metavar="TEXT",
    help="Text to paint, instead of a class; may be given many times.",
)
@click.option(
    "-n",
    "--num",
    type=click.IntRange(1, MAX_IMAGES),
    metavar="N",
    help="Number of images in all, shared among classes or prompts as evenly as it goes.",
)
@click.option(
    "--per-class",
    "--per-prompt",
    type=click.IntRange(1, MAX_IMAGES),
    metavar="N",
    help=f"Number of images of each class or prompt, instead of --num. Default: {PER_CLASS}.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, MAX_SEED),
    default=0,
    show_default=True,
    help="Seed of the first image; the next ones count up.",
)
@click.option(
    "--model",
    default="mixture",
    show_default=True,
    type=OneOf(["mixture", *EXTRAS]),
    help="What to sample: the mixture, or a network that was trained on all rows.",
)
@DEVICE
@click.option(
    "-o",
    "--out",
    type=click.Path(dir_okay=False),
    help="One picture of all images, .png, .jpg or .webp. Default: samples.png, or none with --out-dir.",
)
@click.option(
    "--out-dir", metavar="FOLDER", help="Write each image to a file, named by its class or prompt and its seed."
)
@click.option(
    "--format",
    "ending",
    default="png",
    show_default=True,
    type=OneOf(["png", "jpg", "webp"]),
    help="Format of the files in --out-dir.",
)
@click.option(
    "--trace", metavar="FILE", help="Also write a .png that shows which expert painted which image, step by step."
)
@click.option(
    "--no-show",
    is_flag=True,
    envvar="DDM_NO_SHOW",
    help="Don't show the picture in the terminal. kitty, iTerm2, WezTerm and Ghostty can. Default: $DDM_NO_SHOW.",
)
def sample(
    run_url: str,
    classes: tuple[str, ...],
    prompts: tuple[str, ...],
    num: int | None,
    per_class: int | None,
    seed: int,
    model: Any,
    device: str,
    out: str | None,
    out_dir: str | None,
    ending: str,
    trace: str | None,
    no_show: bool,
    **settings: Any,
) -> None:
    """Sample images from the finished mixture into one picture, with a row per class.

    RUN may also be a folder that `ddm export` wrote. Settings that you leave out are the run's own. The strategy `once`
    is ancestral sampling of the mixture: it draws one expert per image and keeps it to the end. `full` mixes all
    experts at every step, as the paper does. The other strategies lie between these two. Ray isn't needed.

    \b
      ddm sample runs/digits
      ddm sample runs/digits --class 3 --num 8 --strategy full --guidance-scale 1.5 -o threes.png --trace experts.png
      ddm sample runs/digits --per-class 2
      ddm sample runs/digits --class 3 --num 100 --out-dir threes --format webp
      ddm sample exported --class 3
    """
    from ddm_ray.pictures.files import FORMATS, file_name, write

    if out is None and out_dir is None:
        out = "samples.png"
    for option, file, endings in (("--out", out, [*FORMATS]), ("--trace", trace, [".png"])):
        if file is not None and (Path(file).suffix.lower() not in endings or not Path(file).parent.is_dir()):
            raise ConfigError(f"{option} {file}: name a {' or '.join(endings)} file in a folder that exists")
    if classes and prompts:
        raise ConfigError("--class and --prompt are both given: use one")
    if num and per_class:
        raise ConfigError("--num is the number of images in all, --per-class that of each class: use one")
    if out_dir is not None:
        _require_folder(out_dir)
    if trace is not None and out is not None and Path(trace).resolve() == Path(out).resolve():
        raise ConfigError(f"--trace and --out are both {out}: name two files")
    require_settings(settings)
    run = sampled_run(run_url, model)
    if run is not None:
        known = run.named.data.class_names
        names, _ = conditions_of(run.url, run.config.data.num_classes, known, classes, prompts)
        counts_of(len(names), num, per_class or PER_CLASS)
    from torch import Tensor

    from ddm_ray.pictures.fonts import font_for
    from ddm_ray.pictures.grid import FONT_SIZE, GridRow, grid
    from ddm_ray.pictures.images import to_pil
    from ddm_ray.sampling.trace import require_matplotlib

    if trace is not None:
        require_matplotlib()

    with progress(run_url, "sample", LOADING) as report:
        pipeline = _opened(run_url, run, model, device_of(device), phase(report, 0.0, 0.1))
        components = pipeline.components
        num_classes = components.models.info.num_classes
        names, conditions = conditions_of(run_url, num_classes, components.class_names, classes, prompts)
        asked = len(names)
        counts = counts_of(asked, num, per_class or PER_CLASS)
        names = names[: len(counts)]
        row_of = [row for row, count in enumerate(counts) for _ in range(count)]
        num_images = len(row_of)
        kind = "prompt" if num_classes is None else "class_labels"
        seeds = range(seed, seed + num_images)
        given: dict[str, Any] = {kind: [conditions[row] for row in row_of], **settings}
        pipeline.set_progress_bar_config(tqdm_class=partial(StepBar, phase(report, 0.1, 0.99)))
        output = pipeline(**given, seeds=seeds, output_type="pt")
        assert isinstance(output.images, Tensor)
    if len(names) < asked:
        say(f"{num} images are too few for all: they are of the first {num} of {asked}; use --per-class")
    labels = names
    if not font_for(names, FONT_SIZE):
        labels = [str(number) for number in range(1, len(names) + 1)]
        say("no font here has all letters; the rows of the picture are:")
        for label, name in zip(labels, names, strict=True):
            say(f"  {label}: {name}")
    parts = (2 * output.images - 1).split(counts)
    rows = [GridRow(label, images_BCHW) for label, images_BCHW in zip(labels, parts, strict=True)]
    which = f"{num_images} images, seeds {seed} to {seed + num_images - 1}"
    if out is not None:
        picture = grid(rows)
        write(picture, out)
        say(f"{out}: {which}")
        if not no_show:
            _show(picture)
    if out_dir is not None:
        Path(out_dir).mkdir(exist_ok=True)
        for number, picture in enumerate(to_pil(output.images)):
            write(picture, Path(out_dir, file_name(names[row_of[number]], seeds[number], f".{ending}")))
        say(f"{out_dir}: {which}, a file each")
    if trace is not None:
        output.plot_routing(trace)
        say(f"{trace}: which expert painted them, step by step")


def _require_folder(out_dir: str) -> None:
    """Raise ConfigError unless a folder can be made there. It is made once there are images, and stays after that."""
    new = not Path(out_dir).is_dir()
    try:
        Path(out_dir).mkdir(exist_ok=True)
        if new:
            Path(out_dir).rmdir()
    except OSError as error:
        raise ConfigError(f"--out-dir {out_dir}: {error.strerror}; name a folder in one that exists") from None


def _opened(run_url: str, run: "Run | None", model: Any, device: str, on_progress: OnProgress) -> "DDMPipeline":
    """The pipeline of a run, or, if there is none, of the folder that was exported."""
    from ddm_ray.pipeline import DDMPipeline

    def on_loaded(loaded: int, total: int) -> None:
        on_progress(loaded / total, f"{LOADING}: {loaded} of {total}")

    if run is None:
        return DDMPipeline.from_pretrained(run_url, device, on_loaded=on_loaded)
    return DDMPipeline.from_run(run, device, model, on_loaded=on_loaded)


def _show(picture: "Image") -> None:
    """Draw a picture in the terminal, if it can."""
    from ddm_ray.pictures.terminal import inline, protocol

    if sys.stdout.isatty() and (known := protocol(os.environ)):
        click.echo(inline(picture, known, shutil.get_terminal_size().columns), nl=False)


@main.command()
@RUN
@click.argument("folder", type=click.Path(file_okay=False))
@click.option(
    "--model",
    default="mixture",
    show_default=True,
    type=OneOf(["mixture", *EXTRAS]),
    help="The mixture, for DDMPipeline; or one dense network, which plain diffusers opens.",
)
@click.option("--license", "license_name", metavar="NAME", help="Licence for a dense model's card, such as cc-by-4.0.")
@click.option("--overwrite", is_flag=True, help="Replace an earlier export in FOLDER. Other files stay.")
def export(run_url: str, folder: str, model: Any, license_name: str | None, overwrite: bool) -> None:
    """Write finished models to FOLDER in the layout of diffusers pipelines, with one folder per component.

    FOLDER is independent of the run. The command only copies weights, so it needs no GPU. Open the mixture with
    `ddm sample FOLDER` or DDMPipeline.from_pretrained. The student or the monolith becomes an ordinary pipeline with a
    model card: diffusers opens it without ddm-ray, and samples the same images for the same seeds.

    \b
      ddm export runs/digits exported
      ddm export runs/digits student --model student --license cc-by-4.0
    """
    if license_name is not None and not re.fullmatch(r"[A-Za-z0-9][\w.+-]*", license_name):
        raise ConfigError(f"--license {license_name!r}: use a name without blanks, such as cc-by-4.0")
    if license_name and model == "mixture":
        raise ConfigError("--license is for the card of a dense model: name one with --model")
    run = sampled_run(run_url, model)
    from ddm_ray.sampling.export_folder import require_free

    require_free(folder, overwrite, "--overwrite")
    if model == "mixture":
        from ddm_ray.sampling import pretrained

        with progress(run_url, "export", LOADING) as report:
            pipeline = _opened(run_url, run, model, "cpu", phase(report, 0.0, 0.5))
            on_written = partial(_written, phase(report, 0.5, 0.99))
            pretrained.save(pipeline.components, folder, overwrite, on_written)
        say(f"{folder}: model_index.json and one folder for each component; next: {ddm_line('sample', folder)}")
        return
    from ddm_ray.sampling.card import model_card
    from ddm_ray.sampling.dense_export import save_dense

    assert run is not None  # only a mixture is in a folder that was exported
    with progress(run_url, "export", LOADING) as report:
        components = _opened(run_url, run, model, "cpu", phase(report, 0.0, 0.5)).components
        report(0.5, "writing")
        save_dense(components, model_card(run, model, license_name), folder, overwrite)
    say(f"{folder}: a pipeline that diffusers opens without ddm-ray; README.md says how")


def _written(on_progress: OnProgress, written: int, total: int) -> None:
    on_progress(written / total, f"writing experts: {written} of {total}")
