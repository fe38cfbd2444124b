"""A collection of files, whose kind is told by their names or by `data.format`."""

from collections import Counter
from collections.abc import Container, Iterable, Iterator

from ddm_ray.data.images import EXTENSIONS
from ddm_ray.data.sources import folder, parquet, webdataset
from ddm_ray.data.sources.chunks import Chunk, Unit
from ddm_ray.data.sources.conditions import Conditions
from ddm_ray.data.sources.files import Files
from ddm_ray.errors import DataError

KINDS = {"folder": EXTENSIONS, "webdataset": frozenset({"tar"}), "parquet": frozenset({"parquet"})}
_CALLED = {"folder": "images", "webdataset": "tars", "parquet": "parquet files"}
MOST_ENDINGS = 9
_COMPRESSED = "compressed tars aren't read: unpack them"


class Collection:
    """A folder of images, WebDataset tars, or parquet files; see Source."""

    def __init__(self, files: Files, conditions: Conditions, chunk_rows: int):
        self.files = files
        self.conditions = conditions
        self.chunk_rows = chunk_rows
        self.ignored: dict[str, int] = {}

    @property
    def classes(self) -> tuple[str, ...] | None:
        """See Source: names of class folders where the run only counts its classes."""
        return self.conditions.classes

    def units(self) -> list[Unit]:
        """See Source."""
        sizes = self.files.sizes()
        kind = self.conditions.config.format or self._sniff(sizes)
        wanted = {path: size for path, size in sizes.items() if extension(path) in KINDS[kind]}
        if not wanted:
            raise DataError(f"data.source {self.files.url!r}: no {_CALLED[kind]} in it (data.format {kind})")
        self.ignored = _endings(path for path in sizes if path not in wanted)
        if kind != "folder":
            return [Unit(path, size, (path,), (size,)) for path, size in wanted.items()]
        found = folder.classes(list(wanted), self.conditions, self.files.url)
        self.conditions = Conditions(self.conditions.config, found)
        return folder.units(wanted, self.chunk_rows)

    def read(self, unit: Unit, skip: Container[int] = ()) -> Iterator[Chunk]:
        """See Source."""
        kind = _kind(unit.files[0])
        assert kind is not None, unit
        reader = {"folder": folder.read, "webdataset": webdataset.read, "parquet": parquet.read}[kind]
        return reader(self.files, unit, self.chunk_rows, skip, self.conditions)

    def _sniff(self, sizes: dict[str, int]) -> str:
        counts = {kind: sum(extension(path) in names for path in sizes) for kind, names in KINDS.items()}
        found = {kind: count for kind, count in counts.items() if count}
        if not found:
            seen = ", ".join(f"{count} {ending}" for ending, count in _endings(sizes).items())
            what = f"{len(sizes)} files ({seen}), none of them" if sizes else "empty: there are no"
            raise DataError(f"data.source {self.files.url!r}: {what} images, tars or parquet files")
        if len(found) > 1:
            several = " and ".join(f"{count} {_CALLED[kind]}" for kind, count in found.items())
            raise DataError(
                f"data.source {self.files.url!r}: {several}; begin a run with --set data.format={' or '.join(found)}"
            )
        return next(iter(found))


def extension(path: str) -> str:
    """Of a file's name, in small letters."""
    return path.rpartition("/")[2].rpartition(".")[2].lower()


def _endings(paths: Iterable[str]) -> dict[str, int]:
    """How many files have which ending, the commonest first; rare ones are summed up."""
    counts = Counter(map(_ending, paths)).most_common()
    shown = dict(counts[:MOST_ENDINGS])
    others = sum(count for _, count in counts[MOST_ENDINGS:])
    return shown | ({"of other endings": others} if others else {})


def _ending(path: str) -> str:
    if compressed := _compressed(path):
        return f"{compressed} ({_COMPRESSED})"
    return f".{extension(path)}" if "." in path.rpartition("/")[2] else "without an ending"


def _compressed(path: str) -> str | None:
    endings = (".tgz", ".tbz2", ".txz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst")
    return next((ending for ending in endings if path.lower().endswith(ending)), None)


def _kind(path: str) -> str | None:
    return next((kind for kind, names in KINDS.items() if extension(path) in names), None)
