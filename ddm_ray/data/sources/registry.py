"""Sources and file formats by name: our own, and those of other installed packages.

Each is a class, with a line in one of the tables here. Another package has that line in its pyproject.toml:

    [project.entry-points."ddm_ray.sources"]
    stripes = "my_package.stripes:Stripes"

A configuration can name a source but not a module, so only what is installed on this machine is ever imported.
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
    """Classes by name: a table of our own, each as `module:class`, and the entry points of a group.

    A class is imported on first use. Other packages are searched only for names that aren't ours.
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
        """The class of a name. Raises DataError if another package's class can't be imported."""
        entry = self._entries.get(name) or self._others[name]
        try:
            return cast(type[KindT], entry.load())
        except Exception as error:
            if name in self._entries:
                raise  # a bug of ours: no remedy for users
            raise DataError(
                f"{name}: {entry.value}, of the package {_package(entry)}, can't be imported"
                f" ({one_line(error, 200)}); mend it, or uninstall it"
            ) from None

    @cached_property
    def _others(self) -> dict[str, EntryPoint]:
        """Entry points of other packages by name, sorted. Raises DataError for a name that is registered twice."""
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
"""Sources without files, by the first word of `data.source`."""
FORMATS: "Registry[Format]" = Registry(
    "ddm_ray.formats",
    {
        "folder": "ddm_ray.data.sources.folder:Folder",
        "webdataset": "ddm_ray.data.sources.webdataset:WebDataset",
        "parquet": "ddm_ray.data.sources.parquet:Parquet",
    },
)
"""File formats, by the value of `data.format`."""
MOVED = frozenset({"emoji", "domains", "patches", "idx"})
"""Names in configurations of older runs that used to be ours."""
MOVED_TO = "is of the package ddm-ray-study, which isn't installed: pip install ./study, in a copy of ddm-ray's source"
