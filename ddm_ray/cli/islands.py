"""The group of verbs on islands themselves."""

from ddm_ray.cli.command import main


@main.group()
def islands() -> None:
    """Look after islands: check them, see what they do, ask them to leave, and take that back.

    An island is a Ray cluster of its own, with a token of its own, which shares nothing with the others but storage.

    \b
      ddm islands check RUN --islands islands.yaml
      ddm islands list RUN
      ddm islands drain RUN north
      ddm islands resume RUN north
    """
