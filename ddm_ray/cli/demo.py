"""The verb that shows all stages on this computer."""

import os
import shutil
import sys
from pathlib import Path
from textwrap import wrap
from typing import Any

import click

from ddm_ray.cli.command import RECIPE_HELP, SET_HELP, main, say
from ddm_ray.cli.fixes import by, ddm_line
from ddm_ray.cli.train import each_failure_named
from ddm_ray.spelling import shell_line

WIDTH = 88
"""Letters of a line of prose on the screen."""


@main.command()
@click.option("--run", "run_url", default=None, metavar="RUN", help="Folder of the run. Default: runs/RECIPE.")
@click.option("--recipe", default="digits", show_default=True, metavar="NAME", help=RECIPE_HELP)
@click.option("--set", "settings", multiple=True, metavar="A.B=C", help=SET_HELP)
def demo(run_url: str | None, recipe: str, settings: tuple[str, ...]) -> None:
    """Run all stages on this computer: real images, experts, monolith, router, samples, a report.

    It takes some three minutes on two cores, and needs neither GPU nor network. At the end there is a picture of real
    images, the monolith's and the mixture's, and of which expert painted what. You may stop it at any moment; the same
    command continues.

    \b
      ddm demo
      ddm demo --recipe shapes        here the mixture beats the monolith (extra lite0)
      ddm demo --run runs/mine --set partition.num_clusters=8
    """
    from ddm_ray.config import load_recipe

    load_recipe(recipe, settings)  # refuses a mistake before PyTorch is imported, which takes seconds
    from ddm_ray import demo as demonstration

    folder = run_url or f"runs/{Path(recipe).stem}"
    with each_failure_named():
        run = demonstration.demo(folder, recipe, settings, by("this command"))
    _show(run, folder, demonstration.NAME)


def _show(run: Any, folder: str, name: str) -> None:
    """Print one sentence on what was made, the paths of its picture and its report, and commands to go on with."""
    from ddm_ray.evaluate.apart import apart_in_words
    from ddm_ray.evaluate.run import read_metrics
    from ddm_ray.run.graph import evaluation

    say("")
    if sentence := apart_in_words(read_metrics(run, name)):
        for line in wrap(sentence, WIDTH):
            say(line)
        say("")
    for what, file in (("all numbers", "report.html"), ("the picture", "mixture.png")):
        say(f"{what}:  {run.url}/{evaluation(name)}/{file}")
    say("")
    say("next:")
    if activation := _activation():
        say(f"  {activation}")
    names = run.named.data.class_names
    one_class = ("--class", names[-1]) if len(names) > 1 else ()
    commands = {
        ddm_line("sample", folder, *one_class): "paint images",
        ddm_line("serve", folder): "answer over HTTP, with a page for the browser",
        ddm_line("evaluate", folder, "--name", name): "the table of all models and strategies",
        ddm_line("--help"): "all commands",
    }
    width = max(map(len, commands))
    for command, purpose in commands.items():
        say(f"  {command:<{width}}  # {purpose}")


def _activation() -> str | None:
    """The line of shell that puts this environment's commands on the path; None if they are there."""
    script = Path(sys.prefix, "bin", "activate")
    return shell_line(".", os.path.relpath(script)) if shutil.which("ddm") is None and script.exists() else None
