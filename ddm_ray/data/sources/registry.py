"""Sources and formats of files by their names: ours, and those of other installed packages.

Each is a class, and a line in one of the tables here. A package of one's own has that line in its pyproject.toml:

    [project.entry-points."ddm_ray.sources"]
    stripes = "my_package.stripes:Stripes"

A configuration names one, and can name no module: only what is installed on this machine is ever imported.
"""

from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from ddm_ray.errors import DataError
from ddm_ray.spelling import one_line

if TYPE_CHECKING:
    from ddm_ray.data.sources.collection import Format
    from ddm_ray.data.sources.named import NamedSource

KindT = TypeVar("KindT")


class Registry(Generic[KindT]):
    """Classes by name: a table of ours, each as `module:class`, and the entry points of a group.

    A class is imported when it is first asked for. Other packages are looked for only where a name is none of ours.
    """

    def __init__(self, group: str, ours: Mapping[str, str]):
        self.group, self.ours = group, tuple(ours)
        self._entries = {name: EntryPoint(name, place, group) for name, place in ours.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._entries or name in self._others

    def __iter__(self) -> Iterator[str]:
        """All names, ours first."""
        yield from self._entries
        yield from self._others

    def __getitem__(self, name: str) -> type[KindT]:
        """The class of a name. Raises DataError for one of another package that can't be imported."""
        entry = self._entries.get(name) or self._others[name]
        try:
            return cast(type[KindT], entry.load())
        except Exception as error:
            if name in self._entries:
                raise  # no user can mend it
            raise DataError(
                f"{name}: {entry.value}, of the package {_package(entry)}, can't be imported"
                f" ({one_line(error, 200)}); mend it, or uninstall it"
            ) from None

    @cached_property
    def _others(self) -> dict[str, EntryPoint]:
        """Entries of other packages by name, in order. Raises DataError for a name that is registered twice."""
        entries: dict[str, EntryPoint] = {}
        for entry in sorted(entry_points(group=self.group), key=lambda entry: entry.name):
            if entry.name in entries or entry.name in self._entries:
                both = " and ".join({_package(each): 0 for each in (entries.get(entry.name), entry)})
                raise DataError(f"{entry.name!r} in {self.group} is registered twice, by {both}; uninstall one")
            entries[entry.name] = entry
        return entries


def _package(entry: EntryPoint | None) -> str:
    return entry.dist.name if entry and entry.dist else "ddm-ray"


SOURCES: "Registry[NamedSource]" = Registry(
    "ddm_ray.sources",
    {
        "digits": "ddm_ray.data.sources.digits:Digits",
        "shapes": "ddm_ray.data.sources.shapes:Shapes",
    },
)
"""Sources without files, by the word that `data.source` begins with."""
FORMATS: "Registry[Format]" = Registry(
    "ddm_ray.formats",
    {
        "folder": "ddm_ray.data.sources.folder:Folder",
        "webdataset": "ddm_ray.data.sources.webdataset:WebDataset",
        "parquet": "ddm_ray.data.sources.parquet:Parquet",
    },
)
"""Formats of files, by the value of `data.format`."""
MOVED = frozenset({"emoji", "domains", "patches", "idx"})
"""Names in configurations of older runs that were ours."""
MOVED_TO = "is of the package ddm-ray-study, which isn't installed: pip install ./study, in a copy of ddm-ray's source"
