"""The verb that shows all stages on this computer."""

import os
import shlex
import shutil
import sys
from pathlib import Path

import click

from ddm_ray.cli.command import RECIPE_HELP, SET_HELP, main, say
from ddm_ray.cli.evaluate import show_evaluation
from ddm_ray.cli.fixes import by
from ddm_ray.cli.train import each_failure_named


@main.command()
@click.option("--run", "run_url", default=None, metavar="RUN", help="Folder of the run. Default: runs/RECIPE.")
@click.option("--recipe", default="digits", show_default=True, metavar="NAME", help=RECIPE_HELP)
@click.option("--set", "settings", multiple=True, metavar="A.B=C", help=SET_HELP)
def demo(run_url: str | None, recipe: str, settings: tuple[str, ...]) -> None:
    """Run all stages on this computer: real images, experts, monolith, router, samples, a report.

    This takes minutes on two cores and needs neither GPU nor network. You may stop it at any moment; the same command
    continues.

    \b
      ddm demo
      ddm demo --recipe shapes        here the mixture beats the monolith (extra lite0)
      ddm demo --run runs/mine --set partition.num_clusters=8
    """
    from ddm_ray import demo as demonstration

    folder = run_url or f"runs/{Path(recipe).stem}"
    with each_failure_named():
        run = demonstration.demo(folder, recipe, settings, by("this command"))
    show_evaluation(run, demonstration.NAME)
    say("")
    say("next:")
    if activation := _activation():
        say(f"  {activation}")
    names = run.named.data.class_names
    one_class = ("--class", names[-1]) if len(names) > 1 else ()
    for command in (shlex.join(("sample", folder, *one_class)), f"serve {folder}", f"status {folder}", "--help"):
        say(f"  ddm {command}")


def _activation() -> str | None:
    """The line of shell that puts this environment's commands on the path; None if they are there."""
    script = Path(sys.prefix, "bin", "activate")
    return f". {os.path.relpath(script)}" if shutil.which("ddm") is None and script.exists() else None
