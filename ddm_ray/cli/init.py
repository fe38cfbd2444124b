"""The verb that begins a run: from a recipe, or from another run."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ddm_ray.cli.command import NEW_RUN, RECIPE_HELP, SET_HELP, RunUrl, main, say, waiting, warn
from ddm_ray.cli.fixes import ddm_line
from ddm_ray.cli.sources import SourcesCommand
from ddm_ray.errors import ConfigError
from ddm_ray.spelling import some


class ExpertOrNearest(click.ParamType):
    """The number of an expert, or the word for the nearest one."""

    name = "expert"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """See click."""
        if value == "nearest" or str(value).isdecimal():
            return "nearest" if value == "nearest" else int(value)
        return self.fail(f"{value!r} is neither an expert's number nor nearest", param, ctx)


CLUSTERS: dict[str, Any] = {"multiple": True, "type": click.IntRange(0), "metavar": "K"}


@main.command(cls=SourcesCommand)
@NEW_RUN
@click.option("--recipe", metavar="NAME", help=RECIPE_HELP)
@click.option("--from", "base", metavar="RUN1", type=RunUrl(), help="Derive the run from this one, as described above.")
@click.option("--set", "settings", multiple=True, metavar="A.B=C", help=SET_HELP)
@click.option(
    "--unseen",
    is_flag=True,
    help="Don't look at images and networks, because they are on another machine or come later.",
)
@click.option(
    "--append",
    "appended",
    metavar="[URI]",
    is_flag=False,
    flag_value="",
    help="With --from: new files join the clusters that there are. Default: those of RUN1's own source.",
)
@click.option(
    "--add",
    "added",
    multiple=True,
    metavar="URI",
    help="With --from: images of a new cluster. May be repeated.",
)
@click.option(
    "--clusters",
    multiple=True,
    type=click.IntRange(1),
    metavar="N",
    help="Clusters of each --add. Default: 1.",
)
@click.option(
    "--begin-from",
    type=ExpertOrNearest(),
    metavar="K",
    help="With --add: the new expert begins with the weights of expert K, or of the `nearest` cluster's. Default:"
    " random ones.",
)
@click.option("--drop", **CLUSTERS, help="With --from: cluster K leaves, with its expert and images. May be repeated.")
@click.option("--split", **CLUSTERS, help="With --from: cluster K becomes two, with experts that begin as expert K.")
@click.option("--retrain", **CLUSTERS, help="With --from: expert K is trained again, on the same images.")
@click.option("--copy", "copied", is_flag=True, help="With --from: copy what is kept, so that RUN1 may be deleted.")
@click.option("--dry-run", is_flag=True, help="With --from: show what would become of RUN1's artifacts. Write nothing.")
def init(run_url: str, recipe: str | None, base: str | None, settings: tuple[str, ...], **options: Any) -> None:
    """Begin a run: write its configuration to RUN/run.json.

    If the images are on this disk, the command looks at them and prints what it finds: files, classes, sizes, and what
    can't be read. It also compares the sizes of text encoder and autoencoder, if this machine has them. Repeat it with
    other settings until the result is right. From `ddm prepare` on, the configuration can't be changed.

    \b
      ddm init runs/mine --recipe photos-cpu --set data.source=~/photos
      ddm init runs/digits --recipe digits
      ddm init s3://bucket/run7 --recipe my.yaml --set partition.num_clusters=8
      ddm init runs/finer --recipe digits --set 'expert.train.init_from={source: runs/digits, network: own}'

    The last example begins each training job with trained weights instead of random ones. They are those of the model
    with the same name, or of one network for all experts (network: monolith, or 'expert 3'). The source is another run,
    an exported pipeline, a transformer of diffusers, or a .safetensors file with the network's tensors. The weights are
    copied into RUN.

    With --from, RUN is like RUN1 but for what you change. It keeps all that stays the same, and refers to it in RUN1;
    the command says what it keeps, continues and trains again, and what that costs. RUN1 doesn't change. More steps go
    on from RUN1's last states, and give the same bits as one longer training. Other changes may be combined.

    \b
      ddm init runs/2 --from runs/1 --set expert.train.steps=4000     more steps
      ddm init runs/2 --from runs/1 --append                          new files in RUN1's source
      ddm init runs/2 --from runs/1 --add ~/scans                     a data owner joins: a new cluster and expert
      ddm init runs/2 --from runs/1 --drop 3 --copy                   a data owner leaves
      ddm init runs/2 --from runs/1 --split 3 --set experts.new.train.steps=2000 --set router.train.steps=500
      ddm init runs/2 --from runs/1 --retrain 3 --set experts.3.model.size=S

    Settings of experts.new are those of all new clusters' experts.
    """
    if (recipe is None) == (base is None):
        raise ConfigError("give --recipe NAME, or --from RUN1 to derive the run from another one")
    if base is not None:
        from ddm_ray.cli.derive import Asked, derive

        derive(run_url, base, settings, Asked(**options))
        return
    given = [name for name, value in options.items() if value not in (None, (), False) and name != "unseen"]
    if given:
        named = {"appended": "append", "added": "add", "copied": "copy"}
        raise ConfigError(
            f"--{named.get(given[0], given[0]).replace('_', '-')} is for a run that is derived: add --from"
        )
    assert recipe is not None
    _begin(run_url, recipe, settings, options["unseen"])


def _begin(run_url: str, recipe: str, settings: tuple[str, ...], unseen: bool) -> None:
    from ddm_ray.cli.plan import outlook
    from ddm_ray.config import load_recipe
    from ddm_ray.data.prepare.stage import require_known_sizes
    from ddm_ray.data.sources import absolute_name, open_source
    from ddm_ray.run.inputs import beginnings_of
    from ddm_ray.run.run import Run
    from ddm_ray.store.store import Store

    config = load_recipe(recipe, settings)
    source = absolute_name(config.data.source)
    # Absolute, since other processes have other current folders.
    config = config.model_copy(update={"data": config.data.model_copy(update={"source": source})})
    if os.path.isabs(source) and Path(source).resolve() == Store(run_url).local:
        raise ConfigError(f"RUN {run_url} is the folder of its images; give it one of its own, as {run_url}/run")
    if not unseen:
        require_known_sizes(config.data)
        open_source(config.data)  # reads nothing, but refuses an unknown source or format
        tell_look(config)

    def on_replaced(differences: str) -> None:
        say(f"replaces the earlier configuration, from which nothing is made yet: {differences}")

    start = begin_with_weights if beginnings_of(config) else Run.create
    run = start(run_url, config, on_replaced=on_replaced)
    say(f"run {run.config.name!r} at {run.url}")
    outlook(run, run_url)
    say(f"next: {ddm_line('prepare', run_url)}")


def tell_look(config: Any, every_class: bool = True) -> None:
    """Print what a source on this disk has. Raises DataError, with the remedy, if no run can be made from it.

    `every_class`: see `look`.
    """
    from ddm_ray.data.sources import is_here

    # If shards are given, owners name their images in `ddm prepare`.
    if not is_here(config.data.source) or config.partition.given:
        return
    from ddm_ray.data.sources.look import look

    with waiting("looking at the images"):
        seen = look(config, every_class)
    for line in seen.lines:
        say(line)
    for warning in seen.warnings:
        warn(warning)
    if config.data.num_classes == 1 and len(seen.folders) > 1:
        names, each = some(seen.folders), f"--set data.num_classes={len(seen.folders)}"
        say(f"its folders ({names}) are one class; each is its own with {each}")


def begin_with_weights(run_url: str, config: Any, on_replaced: Callable[[str], None] | None = None) -> Any:
    """Begin a run that starts from other runs' weights, after a check that these fit."""
    from ddm_ray.sampling.initial_weights import create_run

    run, lacking = create_run(run_url, config, on_replaced)
    for artifact in lacking:
        warn(f"{artifact}: there are no such weights, so that nothing that begins with them can be trained")
    return run
