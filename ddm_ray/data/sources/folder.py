"""A folder of images, with a folder per class."""

from collections.abc import Container, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

from ddm_ray.data.images import EXTENSIONS, rejection
from ddm_ray.data.sharded.work import Chunk
from ddm_ray.data.sources.chunks import IMAGE_BYTES, Encoded, EncodedChunk, Listing, Unit, cuts, rows_of_a_part
from ddm_ray.data.sources.collection import Collection, Format
from ddm_ray.data.sources.conditions import Conditions
from ddm_ray.data.sources.files import MISNAMED, THREADS, Files, as_source_error
from ddm_ray.data.sources.splits import class_folder
from ddm_ray.errors import DataError
from ddm_ray.plain_text import name_form
from ddm_ray.remedies import Begin
from ddm_ray.spelling import some

GONE, CLASSLESS = "gone since it was listed, or a link to nothing", "not in a class's folder"


class Folder(Format):
    """See Format. A class's images lie in a folder of its name; with a single class they may lie anywhere."""

    plural = "images"
    about = "images, those of each class in a folder of its own"
    extensions = EXTENSIONS
    one_image_each = True

    def units(self, sizes: Mapping[str, int], chunk_rows: int) -> tuple[Unit, ...]:
        """Ranges of the files, one chunk each: at most `chunk_rows` files, and fewer if that gave only a few ranges."""
        files = list(sizes)
        chunk_rows = min(chunk_rows, rows_of_a_part(len(files)))
        width = len(str(len(files)))
        return tuple(
            Unit(
                key=f"{start:0{width}d}-{stop:0{width}d}",
                bytes=sum(sizes[file] for file in files[start:stop]),
                files=tuple(files[start:stop]),
                sizes=tuple(sizes[file] for file in files[start:stop]),
            )
            for start, stop in pairwise([0, *cuts(sizes.values(), chunk_rows)])
        )

    def list(self, source: Collection, sizes: Mapping[str, int]) -> Listing:
        """See Format. If the run only counts its classes, they are named by the folders."""
        classes = _classes([*sizes], source.conditions, source.files.url)
        return Listing(self.units(sizes, source.chunk_rows), classes, rows=len(sizes))

    def read(self, source: Collection, unit: Unit, skip: Container[int]) -> Iterator[EncodedChunk]:
        """See Format. A file that is missing, changed or unreadable gives a row with a problem.

        Raises DataError if the source, not a file, is missing: see `check_missing`; or most files of a chunk are.
        """
        for number, (start, stop) in enumerate(pairwise([0, *cuts(unit.sizes, source.chunk_rows)])):
            if number not in skip:
                listed = list(zip(unit.files[start:stop], unit.sizes[start:stop], strict=True))
                yield Chunk(number, _rows(source.files, listed, source.conditions), stop / len(unit.files))


def _classes(files: list[str], conditions: Conditions, url: str) -> tuple[str, ...] | None:
    """Names of the folders, if the run only counts its classes; None if they are the run's own class names.

    Raises DataError for folders that aren't classes, for more folders than classes, and if there are no folders.
    """
    if conditions.captions:
        raise DataError(f"data.source {url!r}: a folder has no captions; give WebDataset tars or parquet files")
    if not conditions.needed:
        return None
    split = conditions.config.split
    folders = sorted({name_form(folder) for file in files if (folder := class_folder(file, split))})
    if not folders:
        each = f"the images of each of the {conditions.num_classes} classes in a folder of its own"
        fix = Begin(field="data.num_classes", value="1")
        raise DataError(f"data.source {url!r}: no folders in it; put {each}, unless all are of one class", fix)
    names = set(map(name_form, conditions.config.class_names))
    if not conditions.counted or names & set(folders):
        # Otherwise every image of a misspelt class would be left out.
        if strays := sorted(set(folders) - names):
            without = sorted(names - set(folders))
            raise DataError(
                f"data.source {url!r}: class folders that are no class: {some(strays)}; of class_names without a"
                f" folder: {some(without) or 'none'}; begin a run with the folders' names, or move them away"
            )
        return None
    if len(folders) > conditions.num_classes:
        num = len(folders)
        many = f"{num} class folders ({some(folders)}) are more than data.num_classes {conditions.num_classes}"
        raise DataError(f"data.source {url!r}: {many}", Begin(field="data.num_classes", value=f"{num}"))
    return tuple(folders)


def _rows(files: Files, listed: list[tuple[str, int]], conditions: Conditions) -> list[Encoded]:
    # Overlaps round trips to other machines; a local disk's are too short to gain from it.
    with ThreadPoolExecutor(THREADS if files.remote else 1) as pool:
        rows = list(pool.map(lambda file: _row(files, file[0], file[1], conditions), listed))
    gone = [row for row in rows if row.problem == GONE]
    if len(gone) > max(1, len(rows) / 2):
        what = f"{files.where(gone[0].id)} and {len(gone) - 1} of the {len(rows) - 1} files next to it"
        dangling = files.dangling(gone[0].id)
        raise DataError(f"{what}: {dangling}") if dangling else files.lost(what)
    return rows


def _row(files: Files, path: str, size: int, conditions: Conditions) -> Encoded:
    try:
        folder = class_folder(path, conditions.config.split)
        if conditions.needed and folder is None:
            raise ValueError(CLASSLESS)
        condition = conditions.of(folder)
    except ValueError as problem:
        return Encoded(path, None, None, str(problem))
    try:
        with as_source_error(files.where(path)):
            return Encoded(path, _bytes(files, path, size), condition)
    except _Unreadable as problem:
        return Encoded(path, None, None, str(problem))


class _Unreadable(Exception):
    pass


def _bytes(files: Files, path: str, size: int) -> bytes:
    if size > IMAGE_BYTES:
        raise _Unreadable(f"has {size} bytes, more than {IMAGE_BYTES}")
    try:
        content = files.read(path, size)
    except FileNotFoundError:
        files.check_missing(path)
        raise _Unreadable(MISNAMED if files.misnamed(path) else GONE) from None
    except (PermissionError, IsADirectoryError) as error:
        raise _Unreadable(rejection(error).partition(" Detail")[0]) from None
    if len(content) != size:
        raise _Unreadable("changed since it was listed")
    return content
