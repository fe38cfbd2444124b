"""Verbs that show what a run can be: the recipes that are shipped, and all fields of a configuration."""

import click

from ddm_ray.cli.command import main, say
from ddm_ray.cli.sources import registered
from ddm_ray.errors import ConfigError
from ddm_ray.spelling import amount, numbered

PAGE = """\
# The configuration of a run, an island and a server

Written by `ddm fields --markdown` from the types in `ddm_ray/`. It has three parts:

- [The run](#the-run): what a run is. A recipe is a YAML file of these fields, and
  `ddm init RUN --recipe NAME --set data.image_size=64` changes one. `ddm recipes` lists the recipes that are shipped.
  Installed packages may add sources and formats, which `ddm fields data.` lists with ours.
- [An island](#an-island): where and how it trains, as `islands.yaml` says, or `--placement` as JSON. This is no part of
  what a run is, and may change at any time. [Train on several machines](../howto/machines.md) shows such a file.
- [The server](#the-server): options of `ddm serve`, and `args` in a Serve configuration such as `serving/mixture.yaml`.
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

    \b
      ddm recipes show photos-cpu
    """
    from ddm_ray.config import load_recipe, recipe_text

    click.echo(recipe_text(name).rstrip())
    from ddm_ray.models import weights
    from ddm_ray.models.flops import num_parameters, training_bytes
    from ddm_ray.models.spec import experts_by_network, router_spec

    config = load_recipe(name)
    experts = experts_by_network(config)
    lines = [(numbered("expert", own) if experts[1:] else "expert", spec, len(own)) for spec, own in experts]
    for kind, spec, number in [*lines, ("router", router_spec(config), 1)]:
        network = weights.build(spec, "meta")
        memory = f"{amount(training_bytes(network))} of memory for weights and optimizer as it trains"
        many = f"{number} x " if number > 1 else ""
        say(f"# {kind}: {many}{num_parameters(network):,} parameters, {memory}{' each' if many else ''}")


@main.command()
@click.argument("pattern", default="")
@click.option("--markdown", is_flag=True, help="Print all as the page docs/reference/configuration.md.")
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

    shown, values = 0, registered()
    for group in field_groups(RunConfig):
        matches = [each for each in group.fields if any(pattern in f"{path}.{each.name}" for path in group.paths)]
        if matches:
            title = ", ".join(path or "the run" for path in group.paths)
            click.secho(f"{title}: {group.kind}" if group.kind else title, bold=True)
        for each in matches:
            say(f"  {each.name:<18} {each.values}; default {each.default}".replace("; default required", "; required"))
            say(f"  {'':<18} {each.about}")
            for value, about in values.get(f"{group.paths[0]}.{each.name}", ()):
                say(f"  {'':<18}   {value}: {about}")
        shown += len(matches)
    if not shown:
        raise ConfigError(f"no field has {pattern!r} in its name; ddm fields lists all")


def page() -> str:
    """docs/reference/configuration.md."""
    from ddm_ray.config import RunConfig
    from ddm_ray.config.fields import field_groups
    from ddm_ray.placement import IslandFields
    from ddm_ray.serve.cluster.args import ServeArgs

    lines, values = [PAGE], registered(ours=True)
    groups = [("The run", group) for group in field_groups(RunConfig)]
    groups += [("An island", group) for group in field_groups(IslandFields)]
    groups += [("The server", group) for group in field_groups(ServeArgs)]
    for top, group in groups:
        title = ", ".join(f"`{path}`" if path else top for path in group.paths)
        title += f": {group.kind}" if group.kind else ""
        lines += [f"## {title}", "", group.about, "", "| field | values | default | |", "|---|---|---|---|"]
        cells = ((f"`{each.name}`", each.values, each.default, each.about) for each in group.fields)
        escaped = (" | ".join(cell.replace("|", r"\|") for cell in row) for row in cells)
        lines += [f"| {row} |" for row in escaped]
        lines.append("")
        for field in (f"{group.paths[0]}.{each.name}" for each in group.fields):
            if field in values:
                lines += [
                    f"Names that `{field}` may have:",
                    "",
                    *(f"- `{value}`: {about}" for value, about in values[field]),
                    "",
                ]
    return "\n".join(lines)
