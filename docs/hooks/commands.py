"""Examples in the help of commands as blocks of code: click marks them by a `\\b`, which mkdocs-click doesn't know."""

import re
from inspect import cleandoc
from textwrap import dedent
from typing import Any

import click
from mkdocs.config.defaults import MkDocsConfig

EXAMPLE = re.compile(r"^\x08\n(.*?)(?:\n\n|\n?\Z)", re.MULTILINE | re.DOTALL)


def on_config(config: MkDocsConfig, **_: Any) -> MkDocsConfig:
    from ddm_ray.cli import main

    show_examples(main)
    return config


def show_examples(command: click.Command) -> None:
    """Have this command and those below it say their examples in Markdown."""
    if command.help:
        text = cleandoc(command.help)
        command.help = EXAMPLE.sub(lambda example: f"```text\n{dedent(example[1])}\n```\n\n", text)
    for each in command.commands.values() if isinstance(command, click.Group) else ():
        show_examples(each)
