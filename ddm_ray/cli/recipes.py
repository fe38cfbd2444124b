"""Verbs that show what a run can be: the recipes that are shipped, and all fields of a configuration."""

import click

from ddm_ray.cli.command import main, say
from ddm_ray.errors import ConfigError

EXPECTED_MFU = 0.4
"""Share of a GPU's peak that times are told for; estimated, not measured: benchmarks/gpu_counts.py."""
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

    Of one that trains in bf16 also the time that each takes, by its FLOPs, at 40 % of an H100's peak.

    \b
      ddm recipes show photos-cpu
    """
    from ddm_ray.config import load_recipe, recipe_text

    click.echo(recipe_text(name).rstrip())
    from ddm_ray.models import weights
    from ddm_ray.models.flops import num_parameters, training_bytes, training_flops_per_row
    from ddm_ray.models.spec import spec_of
    from ddm_ray.storage.status import duration
    from ddm_ray.train.hardware import SHORT_NAMES, named_peak

    config = load_recipe(name)
    peak, tokens = named_peak(SHORT_NAMES["H100"], "bf16"), 0 if config.data.text is None else config.data.text.tokens
    assert peak is not None
    for kind, number, train in (
        ("expert", config.partition.num_clusters, config.expert.train),
        ("router", 1, config.router.train),
    ):
        network = weights.build(spec_of(config, kind), "meta")
        memory = f"{training_bytes(network) / 2**20:,.0f} MiB of memory for weights and optimizer as it trains"
        many = f"{number} x " if number > 1 else ""
        say(f"# {kind}: {many}{num_parameters(network):,} parameters, {memory}{' each' if many else ''}")
        if train.precision == "bf16":
            rows = train.steps * (train.global_batch // number)
            flops = rows * training_flops_per_row(network, config.data.shape, tokens)
            time = duration(flops / (EXPECTED_MFU * peak))
            say(f"#   {flops:.1e} FLOPs{' each' if many else ''}: {time} of one H100 at {EXPECTED_MFU:.0%} of its peak")


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
