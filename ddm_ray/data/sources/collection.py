"""A collection of files. Its format follows from their names, or is given by `data.format`."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

from ddm_ray.data.sources.chunks import EncodedChunk, Listing, Source, Unit, rows_of_a_part
from ddm_ray.data.sources.files import Files
from ddm_ray.data.sources.registry import FORMATS, MOVED, MOVED_TO
from ddm_ray.data.sources.splits import of_split
from ddm_ray.errors import ConfigError, DataError
from ddm_ray.remedies import Begin
from ddm_ray.spelling import meant

MAX_ENDINGS = 9
SMALL_IMAGE = 2**14
"""Assumed bytes per image in a file of many if a listing has no counts; low, so that parts don't get too small."""


@dataclass(frozen=True)
class Collection(Source):
    """Files of one format: a folder of images, WebDataset tars, parquet files and so on; see Source.

    `known`: paths of files that a run has already. It isn't asked for its split if these are of several.
    """

    files: Files
    known: frozenset[str] = frozenset()

    def list(self) -> Listing:
        """See Source. If the run only counts its classes, they are named by class folders."""
        skipped = Counter[str]()
        sizes = self.files.sizes(skipped)
        name = self.conditions.config.format or self._sniff(sizes, skipped)
        chosen = format_named(name)
        config, conditions = self.conditions.config, self.conditions
        own = {path: size for path, size in sizes.items() if chosen.owns(path)}
        by_class = chosen.one_image_each and conditions.needed and not conditions.captions
        classes = () if conditions.counted else config.class_names
        names = classes if by_class else None
        kept = of_split(own, config.split, chosen.one_image_each, names, self.files.url, self.known)
        if others := len(own) - len(kept):
            skipped["of other splits"] = others
        own = kept
        listing = chosen.list(self, own) if own else Listing(())
        if not listing.units:
            raise DataError(f"data.source {self.files.url!r}: no {chosen.plural} in it (data.format {name})")
        return replace(listing, ignored=_endings(path for path in sizes if not chosen.owns(path)) | skipped)

    def read(self, unit: Unit, skip: Container[int] = ()) -> Iterator[EncodedChunk]:
        """See Source."""
        chosen = format_of(unit.files[0])
        if chosen is None:
            where = self.files.where(unit.files[0])
            raise DataError(f"{where}: no installed format reads it; install the package of its format")
        return chosen.read(self, unit, skip)

    def _sniff(self, sizes: dict[str, int], skipped: Counter[str]) -> str:
        counts = Counter(name for path in sizes if (name := _name_of(path)))
        if not counts:
            kinds = _endings(sizes) | skipped
            counted = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
            what = f"{sum(kinds.values())} files ({counted}), none of them" if counted else "empty: there are no"
            *others, last = (format_named(name).plural for name in FORMATS)
            raise DataError(f"data.source {self.files.url!r}: {what} {', '.join(others)} or {last}")
        if len(counts) > 1:
            several = " and ".join(f"{count} {format_named(name).plural}" for name, count in counts.items())
            raise DataError(
                f"data.source {self.files.url!r}: {several}", Begin(field="data.format", value=" or ".join(counts))
            )
        return next(iter(counts))


class Format(ABC):
    """Base class of file formats in a collection. Each has a line in `FORMATS`, or is an entry point.

    `plural`: its files in words. `about`: a line of help. `extensions`: of its files' names, in lower case.
    `one_image_each`: each file is an image, and those of a class lie in a folder of that name.
    """

    plural: ClassVar[str]
    about: ClassVar[str]
    extensions: ClassVar[frozenset[str]] = frozenset()
    one_image_each: ClassVar[bool] = False

    def owns(self, path: str) -> bool:
        """True if a file has this format, by its name."""
        return extension(path) in self.extensions

    def units(self, sizes: Mapping[str, int], chunk_rows: int) -> tuple[Unit, ...]:
        """Units of some of its files, given their sizes in bytes; one unit per file by default."""
        return tuple(Unit(path, size, (path,), (size,)) for path, size in sizes.items())

    def list(self, source: Collection, sizes: Mapping[str, int]) -> Listing:
        """The listing of its files in a collection, which has at least one. Raises DataError, StorageError."""
        few = rows_of_a_part(sum(sizes.values()) // SMALL_IMAGE)
        return Listing(self.units(sizes, source.chunk_rows), chunk_rows=min(source.chunk_rows, few))

    @abstractmethod
    def read(self, source: Collection, unit: Unit, skip: Container[int]) -> Iterator[EncodedChunk]:
        """Yield the unit's chunks except those in `skip`; see Source."""

    def count(self, source: Collection, unit: Unit) -> int | None:
        """Rows of a unit, from its files' headers or footers; None if only reading them tells. Raises DataError."""
        return None


@cache
def format_named(name: str) -> Format:
    """The format that `data.format` names. Raises ConfigError for another name, DataError as `Registry`."""
    if name not in FORMATS and name in MOVED:
        raise ConfigError(f"data.format {name!r} {MOVED_TO}")
    if name not in FORMATS:
        raise ConfigError(f"data.format {name!r:.60} is none of {', '.join(FORMATS)}{meant(name, FORMATS)}")
    return FORMATS[name]()


def format_of(path: str) -> Format | None:
    """The format of a file by its name; None if no format reads it."""
    name = _name_of(path)
    return None if name is None else format_named(name)


def _name_of(path: str) -> str | None:
    return next((name for name in FORMATS if format_named(name).owns(path)), None)


def units_of(sizes: dict[str, int], chunk_rows: int) -> tuple[Unit, ...]:
    """Units of files of a collection, all of one format, given their sizes in bytes."""
    chosen = next(map(format_of, sizes), None)
    return chosen.units(sizes, chunk_rows) if chosen else ()


def extension(path: str) -> str:
    """The extension of a file's name, in lower case."""
    return path.rpartition("/")[2].rpartition(".")[2].lower()


def _endings(paths: Iterable[str]) -> dict[str, int]:
    """Numbers of files by extension, the most common first; rare ones are added up."""
    counts = Counter(map(ending, paths)).most_common()
    shown = dict(counts[:MAX_ENDINGS])
    others = sum(count for _, count in counts[MAX_ENDINGS:])
    return shown | ({"of other endings": others} if others else {})


def ending(path: str) -> str:
    """A file's extension for messages."""
    return f".{extension(path)}" if "." in path.rpartition("/")[2] else "without an ending"
