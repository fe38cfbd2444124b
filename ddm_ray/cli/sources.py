"""Lists of all sources of images and formats of files, for the command line and its page of fields."""

from collections.abc import Iterable

import click

Lines = list[tuple[str, str]]
"""Values of a field, each with a description."""


def registered(ours: bool = False) -> dict[str, Lines]:
    """Values of the fields that name a source or format; `ours`: without those of other packages."""
    from ddm_ray.data.sources.registry import FORMATS, SOURCES

    sources: Iterable[str] = SOURCES.ours if ours else SOURCES
    formats: Iterable[str] = FORMATS.ours if ours else FORMATS
    return {
        "data.source": [(" or ".join(SOURCES[name].forms), SOURCES[name].about) for name in sources],
        "data.format": [(name, FORMATS[name].about) for name in formats],
    }


class SourcesCommand(click.Command):
    """A command with the list of all sources and formats at the end of its help."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """See click."""
        super().format_epilog(ctx, formatter)
        values = registered()
        with formatter.section("Images that data.source names, beside a folder, file or URI"):
            formatter.write_dl(values["data.source"])
        with formatter.section("Formats of files (data.format, where their names don't tell)"):
            formatter.write_dl(values["data.format"])
