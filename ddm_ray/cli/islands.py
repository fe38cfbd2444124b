"""Verbs on islands themselves: up and down bring small ones of this machine to life and end them."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ddm_ray.cli.command import main, say

if TYPE_CHECKING:
    from ddm_ray.islands.local import LocalIslands

FOLDER = click.option(
    "--folder",
    default="~/.ddm/islands",
    show_default=True,
    metavar="FOLDER",
    help="Where their tokens, logs and islands.yaml are, closed to other users. Another folder, other islands.",
)


@main.group()
def islands() -> None:
    """Look after islands: check them, ask them to leave; bring up small ones on this machine, and end those.

    An island is a Ray cluster of its own, with a token of its own, which shares nothing with the others but storage.

    \b
      ddm islands up --local 3
      ddm islands check RUN --islands ~/.ddm/islands/islands.yaml
      ddm launch RUN --islands ~/.ddm/islands/islands.yaml
      ddm islands down
    """


@islands.command()
@click.option(
    "--local",
    "number",
    type=click.IntRange(1, 32),
    required=True,
    metavar="N",
    help="How many islands there are to be.",
)
@click.option(
    "--cpus",
    type=click.IntRange(min=1),
    metavar="N",
    help="CPUs of each. Default: its share of this machine's, or one.",
)
@FOLDER
def up(number: int, cpus: int | None, folder: str) -> None:
    """Bring up islands on this machine, which stay until `ddm islands down`; those that run already are left alone.

    Each is a Ray cluster with ports and a token of its own, about 1 GB of memory. They are named local-0, local-1 and
    so on in FOLDER/islands.yaml. Ends once a job has run on each, mostly within a minute. What a lost head left behind
    is ended first.

    \b
      ddm islands up --local 3
      ddm islands up --local 2 --cpus 4 --folder ~/.ddm/pair
    """
    from ddm_ray.cores import usable_cores

    path = _local(folder).up(number, cpus or max(1, usable_cores() // number))
    say(f"{path} names them; next: ddm launch RUN --islands {path}")


@islands.command()
@FOLDER
def down(folder: str) -> None:
    """End the islands that `ddm islands up` brought up: all their processes and files, nothing else.

    Whatever trains there is killed; a run continues from its last saved state. FOLDER/islands.yaml stays, as somebody
    may have edited it.

    \b
      ddm islands down
      ddm islands down --folder ~/.ddm/pair
    """
    if not _local(folder).down():
        say(f"no islands in {folder}")


def _local(folder: str) -> "LocalIslands":
    from ddm_ray.islands.local import LocalIslands

    path = Path(os.path.expanduser(folder)).absolute()
    return LocalIslands(path, lambda name, text: say(f"{name} {text}"))
