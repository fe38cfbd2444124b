"""Verbs that show what a run can be: the recipes that are shipped, and all fields of a configuration."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from ddm_ray.cli.command import main, say
from ddm_ray.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from ddm_ray.config import RunConfig

PAGE = """\
# The configuration of a run

Written by `ddm fields --markdown` from the types in `ddm_ray/config/`. A recipe is a YAML file of these fields, and
`ddm init RUN --recipe NAME --set data.image_size=64` changes one. `ddm recipes` lists the recipes that are shipped.
Where a run is made, and how fast, is no part of it: that is an island's file
([cluster_configs](../cluster_configs/README.md)).
"""


@main.group(invoke_without_command=True)
@click.pass_context
def recipes(context: click.Context) -> None:
    """List the recipes that are shipped, each with what it is for.

    \b
      ddm recipes
      ddm recipes show photos-cpu
      ddm recipes show photos-cpu > mine.yaml      to change more than a few fields
    """
    if context.invoked_subcommand is not None:
        return
    from ddm_ray.config import about_recipe, recipe_names

    names = recipe_names()
    for name in names:
        say(f"{name:<{max(map(len, names))}}  {about_recipe(name)}")
    say("ddm recipes show NAME prints one with its sizes; ddm init RUN --recipe NAME begins a run")


@recipes.command()
@click.argument("name")
def show(name: str) -> None:
    """Print the recipe NAME as YAML, and the sizes of its networks as comments below it.

    Of one that trains in bf16 also what each training takes of an H100 and an H200: its share of the batch, memory
    beside activations, and the time and MFU of a step. These are estimates, from kernels that were counted, of
    uncompiled steps: compiled, as GPUs' are unless the islands' file says otherwise, they take less.

    \b
      ddm recipes show photos-cpu
    """
    from ddm_ray.config import load_recipe, recipe_text

    click.echo(recipe_text(name).rstrip())
    from ddm_ray.models import weights
    from ddm_ray.models.flops import num_parameters, training_bytes
    from ddm_ray.models.spec import spec_of

    config = load_recipe(name)
    for kind, number, train in (
        ("expert", config.partition.num_clusters, config.expert.train),
        ("router", 1, config.router.train),
    ):
        network = weights.build(spec_of(config, kind), "meta")
        memory = f"{training_bytes(network) / 2**20:,.0f} MiB of memory for weights and optimizer as it trains"
        many = f"{number} x " if number > 1 else ""
        say(f"# {kind}: {many}{num_parameters(network):,} parameters, {memory}{' each' if many else ''}")
        if train.precision == "bf16":
            for line in _on_gpus(config, network, train.steps, train.global_batch // number):
                say(f"#   {line}")


def _on_gpus(config: "RunConfig", network: "nn.Module", steps: int, rows: int) -> Iterator[str]:
    """Lines on a training in bf16 of so many steps, of so many rows each, by one GPU."""
    from ddm_ray.models.flops import num_parameters, training_flops_per_row
    from ddm_ray.models.hub import encoders_in_training
    from ddm_ray.models.text import known_flops_per_row
    from ddm_ray.placement import TrainPlacement
    from ddm_ray.spelling import duration
    from ddm_ray.train.estimate import CARDS, bytes_a_parameter

    parameters, placement = num_parameters(network), TrainPlacement()
    flops = rows * training_flops_per_row(
        network, config.data.shape, config.data.text.tokens if config.data.text else 0
    )
    state = f"a state of {16 * parameters / 1e9:.1f} GB every {placement.minutes_between_states:g} minutes or sooner"
    yield f"{steps:,} steps of {rows} rows, {steps * flops:.1e} FLOPs in bf16; {state}"
    alone, of_eight = (
        (bytes_a_parameter("bf16", gpus, use_gpu=True)[placement.zero_stage] or 0) * parameters for gpus in (1, 8)
    )
    beside, texts, slower = 0, "", ""
    if config.data.text and encoders_in_training(config):
        texts, known = " and its text encoder", known_flops_per_row(config.data.text)
        beside, slower = (0, ", its text encoder aside") if known is None else (rows * known, "")
    yield f"memory beside activations{texts}: {alone / 1e9:.1f} GB of one GPU, {of_eight / 1e9:.1f} GB of each of 8"
    for card in CARDS:
        seconds = card.step_seconds(parameters, flops, beside)
        small = f"; its {card.memory / 1e9:.0f} GB are too few" if alone > card.memory else ""
        share = f"{card.mfu(parameters, flops, beside):.0%} MFU{slower}"
        yield f"one {card.name}: {duration(steps * seconds)}, {1e3 * seconds:.0f} ms a step, {share}{small}"


@main.command()
@click.argument("pattern", default="")
@click.option("--markdown", is_flag=True, help="Print all as the page docs/configuration.md.")
def fields(pattern: str, markdown: bool) -> None:
    """Show all fields of a configuration: values, default, advice. With PATTERN only those that have it in their name.

    \b
      ddm fields
      ddm fields train.steps
      ddm fields data.
    """
    if markdown:
        click.echo(page(), nl=False)
        return
    from ddm_ray.config import RunConfig
    from ddm_ray.config.fields import field_groups

    shown = 0
    for group in field_groups(RunConfig):
        matches = [each for each in group.fields if any(pattern in f"{path}.{each.name}" for path in group.paths)]
        if matches:
            click.secho(", ".join(path or "the run" for path in group.paths), bold=True)
        for each in matches:
            say(f"  {each.name:<18} {each.values}; default {each.default}".replace("; default required", "; required"))
            say(f"  {'':<18} {each.about}")
        shown += len(matches)
    if not shown:
        raise ConfigError(f"no field has {pattern!r} in its name; ddm fields lists all")


def page() -> str:
    """docs/configuration.md."""
    from ddm_ray.config import RunConfig
    from ddm_ray.config.fields import field_groups

    lines = [PAGE]
    for group in field_groups(RunConfig):
        title = ", ".join(f"`{path}`" if path else "The run" for path in group.paths)
        lines += [f"## {title}", "", group.about, "", "| field | values | default | |", "|---|---|---|---|"]
        cells = ((f"`{each.name}`", each.values, each.default, each.about) for each in group.fields)
        escaped = (" | ".join(cell.replace("|", r"\|") for cell in row) for row in cells)
        lines += [f"| {row} |" for row in escaped]
        lines.append("")
    return "\n".join(lines)
