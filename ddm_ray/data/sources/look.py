"""A first look at a source on this disk: its contents, and whether a run can use them. Reads little."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import numpy as np

from ddm_ray.config import DataConfig, RunConfig
from ddm_ray.data.images import DECODER_ERRORS, open_image, rejection
from ddm_ray.data.sources import is_here, open_source
from ddm_ray.data.sources.chunks import Encoded, Listing, Source, Unit
from ddm_ray.data.sources.collection import Collection, ending, format_of
from ddm_ray.data.sources.folder import CLASSLESS
from ddm_ray.data.sources.skipped import unread
from ddm_ray.data.sources.splits import class_folder
from ddm_ray.errors import ConfigError, DataError, StorageError
from ddm_ray.remedies import Begin
from ddm_ray.spelling import amount, some

IMAGES = 12
"""Images to look at: spread over a folder, else the first ones of some files."""
PLACES = 4
"""Maximum files of many images to look into."""
COUNTED = 256
"""Maximum files of many images to count rows in, by their headers or footers."""
NAMES = 8

ItemT = TypeVar("ItemT")


@dataclass(frozen=True)
class SourceLook:
    """The contents of a source: `lines`, `warnings`, and for images in folders the number in each (`folders`)."""

    lines: tuple[str, ...]
    warnings: tuple[str, ...]
    folders: dict[str, int]


def look(config: RunConfig, every_class: bool = True) -> SourceLook:
    """Look at the run's source: list it, and read the headers of a few images.

    `every_class`: warn of classes that it has no images of.

    Raises DataError for problems that would stop `prepare`: a source that is missing, of an unknown kind or without
    images, labels that don't fit, fewer images than clusters or components; and StorageError.
    """
    source = open_source(config.data)
    listing = source.list()
    if not isinstance(source, Collection):
        return SourceLook((), (), {})
    files = [(path, size) for unit in listing.units for path, size in zip(unit.files, unit.sizes, strict=True)]
    by_ending = Counter(ending(path) for path, _ in files)
    endings = ", ".join(f"{count:,} {shown}" for shown, count in by_ending.most_common())
    lines = [f"{source.files.url}: {endings}, {amount(sum(size for _, size in files))}"]
    folders, chosen = dict[str, int](), format_of(files[0][0])
    alone = chosen is not None and chosen.one_image_each
    if alone:
        in_folders = (class_folder(path, config.data.split) for path, _ in files)
        folders = dict(sorted(Counter(folder for folder in in_folders if folder).items()))
    count = count_listed_rows(source, listing)
    if count is not None:
        lines[0] += "" if alone else f", {count:,} rows"
        _require_enough(config, source.files.url, count)
    hidden, warnings = unread(listing.ignored)
    lines += hidden
    if folders and source.conditions.needed:
        lines.append(f"classes: {_counted(folders)}")
        warnings += _classless(config, folders, len(files) - sum(folders.values()), every_class)
    elif listing.numbered:
        lines.append(f"classes: {some(listing.numbered, NAMES)}")
    in_files = _spread(listing.units, PLACES)
    if alone:
        few = _spread(files, IMAGES)
        in_files = [Unit("some", 0, tuple(path for path, _ in few), tuple(size for _, size in few))]
    rows = [row for unit in in_files for row in _first_rows(source, listing, unit, IMAGES // len(in_files))]
    if not rows and len(in_files) == len(listing.units):
        _require_enough(config, source.files.url, 0)
    sizes, problems = _heads(rows)
    if rows and not sizes:
        row, problem = problems[0]
        raise DataError(
            f"data.source {source.files.url!r}: none of {len(rows)} images looked at can be used: {problem}, e.g. {row}"
        )
    if sizes:
        lines.append(f"{len(sizes)} images looked at: {_extent(sizes)}")
        side = sorted(min(size) for size in sizes)[len(sizes) // 2]
        if side < config.data.pixel_shape[1]:
            warnings.append(
                f"half of them are smaller than the {config.data.pixel_shape[1]} pixels that are modelled"
                f" ({side} and less): they will be enlarged"
            )
    warnings += [f"{row} can't be used: {problem}" for row, problem in problems if problem != CLASSLESS]
    return SourceLook(tuple(lines), tuple(warnings), folders)


def count_listed_rows(source: Source, listing: Listing) -> int | None:
    """Rows of a source, usable or not, from its listing or its files' headers and footers; None if neither tells."""
    if listing.rows is not None or not isinstance(source, Collection) or len(listing.units) > COUNTED:
        return listing.rows
    chosen, total = format_of(listing.units[0].files[0]), 0
    for unit in listing.units:
        count = chosen.count(source, unit) if chosen else None
        if count is None:
            return None
        total += count
    return total


def count_source_rows(config: DataConfig) -> int | None:
    """Rows of the configured source, usable or not; None if only reading tells (tars), or it isn't on this disk."""
    if not is_here(config.source):
        return None
    try:
        source = open_source(config)
        return count_listed_rows(source, source.list())
    except (ConfigError, DataError, StorageError):
        return None  # `prepare` reports the error


def _require_enough(config: RunConfig, url: str, count: int) -> None:
    """Raise DataError if there are fewer images than components of the embedder, or than clusters."""
    train = int(count * (1 - config.data.heldout))
    clusters, embedder = config.partition.num_clusters, config.embedder
    if not train:
        raise DataError(f"data.source {url!r}: has {count} images, too few to train on any; put more there")
    if train < clusters:
        few = f"{count} images are too few for {clusters} clusters"
        raise DataError(f"data.source {url!r}: {few}", Begin(field="partition.num_clusters", value=f"{train}"))
    if embedder.kind == "pixels" and train < embedder.dim:
        few = f"{count} images are too few for the {embedder.dim} components of their embedding"
        raise DataError(f"data.source {url!r}: {few}", Begin(field="embedder.dim", value=f"{train}"))


def _classless(config: RunConfig, folders: dict[str, int], outside: int, every_class: bool) -> list[str]:
    warnings = []
    if outside:
        warnings.append(f"images in no class's folder are left out: {outside:,}")
    if every_class and (empty := (config.data.num_classes or 0) - len(folders)):
        classes = f"{empty} of {config.data.num_classes} classes (data.num_classes) have no folder"
        warnings.append(f"{classes}, so nothing is learnt of them; there are {len(folders)} folders")
    return warnings


def _spread(items: Sequence[ItemT], most: int) -> list[ItemT]:
    places = np.unique(np.linspace(0, len(items) - 1, most).round().astype(int))
    return [items[place] for place in places]


def _first_rows(source: Source, listing: Listing, unit: Unit, count: int) -> Iterator[Encoded]:
    planned = source.planned(count, listing.classes, numbered=listing.numbered)
    for chunk in islice(planned.read(unit), 1):
        yield from chunk.rows


def _heads(rows: list[Encoded]) -> tuple[list[tuple[int, int]], list[tuple[str, str]]]:
    """Width and height of images from their headers, and ids of rows that can't be used, each with its problem."""
    sizes, problems = [], []
    for row in rows:
        problem = row.problem
        if problem is None:
            try:
                with open_image(row.image or b"") as image:
                    sizes.append(image.size)
            except DECODER_ERRORS as error:
                problem = rejection(error)
        if problem is not None:
            problems.append((row.id, problem))
    return sizes, problems


def _extent(sizes: list[tuple[int, int]]) -> str:
    by_area = sorted(sizes, key=lambda size: size[0] * size[1])
    (width, height), (most_width, most_height) = by_area[0], by_area[-1]
    least, most = f"{width} x {height}", f"{most_width} x {most_height}"
    return f"{least} pixels" if least == most else f"{least} to {most} pixels"


def _counted(counts: dict[str, int]) -> str:
    shown = [f"{name} {count:,}" for name, count in list(counts.items())[:NAMES]]
    return ", ".join(shown) + (f" and {len(counts) - NAMES} more" if len(counts) > NAMES else "")
