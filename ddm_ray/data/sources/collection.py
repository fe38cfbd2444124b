"""A collection of files, whose kind is told by their names or by `data.format`."""

from collections import Counter
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass

from ddm_ray.data.images import EXTENSIONS
from ddm_ray.data.sources import folder, idx, parquet, webdataset
from ddm_ray.data.sources.chunks import EncodedChunk, Listing, Unit, rows_of_a_part
from ddm_ray.data.sources.conditions import Conditioned
from ddm_ray.data.sources.files import Files
from ddm_ray.errors import DataError
from ddm_ray.remedies import Begin

KINDS = {"folder": EXTENSIONS, "webdataset": frozenset({"tar"}), "parquet": frozenset({"parquet"})}
_READERS = {"folder": folder.read, "webdataset": webdataset.read, "idx": idx.read}
_PLURALS = {"folder": "images", "webdataset": "tars", "parquet": "parquet files", "idx": "IDX files of images"}
MAX_ENDINGS = 9
SMALL_IMAGE = 2**14
"""Bytes of an image in a file of many, of which no listing tells the number: few, so that parts aren't too small."""
_COMPRESSED = "compressed tars aren't read: unpack them"


@dataclass(frozen=True)
class Collection(Conditioned):
    """A folder of images, WebDataset tars, parquet files, or IDX files; see Source."""

    files: Files

    def list(self) -> Listing:
        """See Source; classes are the names of class folders where the run only counts its classes."""
        sizes = self.files.sizes()
        kind = self.conditions.config.format or self._sniff(sizes)
        chosen = {path: size for path, size in sizes.items() if kind_of(path) == kind}
        units = units_of(chosen, self.chunk_rows)
        if not units:
            raise DataError(f"data.source {self.files.url!r}: no {_PLURALS[kind]} in it (data.format {kind})")
        ignored = _endings(path for path in sizes if path not in chosen)
        if kind == "folder":
            classes = folder.classes([*chosen], self.conditions, self.files.url)
            return Listing(units, classes, ignored, rows=len(chosen))
        # Of the first file: another that names its classes otherwise is refused when it is read.
        numbered = parquet.named_numbers(self.files, units[0], self.conditions) if kind == "parquet" else None
        rows = sum(idx.row_count(self.files, unit) for unit in units) if kind == "idx" else None
        few = rows_of_a_part(sum(unit.bytes for unit in units) // SMALL_IMAGE if rows is None else rows)
        classes = numbered if self.conditions.counted else None
        return Listing(units, classes, ignored, numbered, rows, min(self.chunk_rows, few))

    def read(self, unit: Unit, skip: Container[int] = ()) -> Iterator[EncodedChunk]:
        """See Source."""
        kind = kind_of(unit.files[0])
        assert kind
        if kind == "parquet":
            return parquet.read(self.files, unit, self.chunk_rows, skip, self.conditions, self.by_values)
        return _READERS[kind](self.files, unit, self.chunk_rows, skip, self.conditions)

    def _sniff(self, sizes: dict[str, int]) -> str:
        counts = Counter(kind for path in sizes if (kind := kind_of(path)))
        if not counts:
            endings = ", ".join(f"{count} {ending}" for ending, count in _endings(sizes).items())
            what = f"{len(sizes)} files ({endings}), none of them" if sizes else "empty: there are no"
            raise DataError(f"data.source {self.files.url!r}: {what} images, tars, parquet or IDX files")
        if len(counts) > 1:
            several = " and ".join(f"{count} {_PLURALS[kind]}" for kind, count in counts.items())
            raise DataError(
                f"data.source {self.files.url!r}: {several}", Begin(field="data.format", value=" or ".join(counts))
            )
        return next(iter(counts))


def units_of(sizes: dict[str, int], chunk_rows: int) -> tuple[Unit, ...]:
    """Units of some files of a collection, by their sizes in bytes: ranges of images, or else one file of many each."""
    kinds = {kind_of(path) for path in sizes}
    if kinds <= {"folder"}:
        return folder.units(sizes, chunk_rows)
    if kinds == {"idx"}:
        return idx.units(sizes)
    return tuple(Unit(path, size, (path,), (size,)) for path, size in sizes.items())


def kind_of(path: str) -> str | None:
    """The kind of a file by its name, as `data.format` has it; None for one that isn't read."""
    if idx.is_idx(path):
        return "idx"
    return next((kind for kind, extensions in KINDS.items() if extension(path) in extensions), None)


def extension(path: str) -> str:
    """The extension of a file's name, in small letters."""
    return path.rpartition("/")[2].rpartition(".")[2].lower()


def _endings(paths: Iterable[str]) -> dict[str, int]:
    """Numbers of files by ending, the commonest first; rare endings are summed up."""
    counts = Counter(map(ending, paths)).most_common()
    shown = dict(counts[:MAX_ENDINGS])
    others = sum(count for _, count in counts[MAX_ENDINGS:])
    return shown | ({"of other endings": others} if others else {})


def ending(path: str) -> str:
    """The ending of a file's name for people, with why it isn't read, of compressed tars."""
    if compressed := _compressed(path):
        return f"{compressed} ({_COMPRESSED})"
    return f".{extension(path)}" if "." in path.rpartition("/")[2] else "without an ending"


def _compressed(path: str) -> str | None:
    endings = (".tgz", ".tbz2", ".txz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst")
    return next((ending for ending in endings if path.lower().endswith(ending)), None)
