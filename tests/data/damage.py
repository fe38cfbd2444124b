"""Files as damage leaves them: bits flipped, ends cut off or added, pages of zeros, another's file in their place."""

import io
import tarfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ddm_ray.errors import DDMError
from tests.data.broken import CLASSES, GOOD, picture

PAGE = 512


@dataclass(frozen=True)
class Damage:
    """What one file of a folder becomes; no data: it is gone."""

    key: str
    kind: str
    data: bytes | None

    def __str__(self) -> str:
        return f"{self.key}: {self.kind}"


def damages(
    key: str, files: Mapping[str, bytes], generator: np.random.Generator, flips: int, cuts: int, swaps: int
) -> Iterator[Damage]:
    """So many of each kind, to one of the files; and those of which there is one kind each."""
    data = files[key]
    for bit in generator.integers(8 * len(data), size=flips).tolist():
        yield Damage(key, f"bit {bit} flipped", flipped(data, [bit]))
    yield Damage(key, "100 bits flipped", flipped(data, generator.integers(8 * len(data), size=100).tolist()))
    for length in [*generator.integers(1, len(data), size=cuts).tolist(), len(data) - 1]:
        yield Damage(key, f"cut to {length} of {len(data)} bytes", data[:length])
    yield Damage(key, "empty", b"")
    yield Damage(key, "gone", None)
    yield Damage(key, "bytes after its end", data + generator.bytes(int(generator.integers(1, 2000))))
    yield Damage(key, "zeros after its end", data + bytes(PAGE))
    start = int(generator.integers(max(1, len(data) - PAGE)))
    hole = bytes(len(data[start : start + PAGE]))
    yield Damage(key, f"zeros from byte {start}", data[:start] + hole + data[start + PAGE :])
    yield Damage(key, "its second half zeros", data[: len(data) // 2] + bytes(len(data) - len(data) // 2))
    others = [other for other in files if files[other] != data]
    alike = [other for other in others if Path(other).suffix == Path(key).suffix]
    chosen = [*alike[:1], *generator.permutation(others)[:swaps].tolist()] if swaps else []
    for other in dict.fromkeys(chosen):
        yield Damage(key, f"replaced by {other}", files[other])


def flipped(data: bytes, bits: list[int]) -> bytes:
    """The bytes with these bits inverted, counted from the first byte's lowest."""
    content = bytearray(data)
    for bit in bits:
        content[bit // 8] ^= 1 << bit % 8
    return bytes(content)


class Folder:
    """A folder as it was, in memory, and how it comes to be so again."""

    def __init__(self, path: Path):
        self.path = path
        self.files = self.now()

    def now(self) -> dict[str, bytes]:
        """The contents of all files by their paths below the folder, in order."""
        paths = sorted(path for path in self.path.rglob("*") if path.is_file())
        return {path.relative_to(self.path).as_posix(): path.read_bytes() for path in paths}

    @contextmanager
    def damaged(self, *damaged: Damage) -> Iterator[None]:
        """With these damages; afterwards all is as it was, whatever was written meanwhile."""
        for damage in damaged:
            path = self.path / damage.key
            if damage.data is None:
                path.unlink()
            else:
                path.write_bytes(damage.data)
        try:
            yield
        finally:
            self.restore()

    def restore(self) -> None:
        """Undo what was done to it."""
        now = self.now()
        for key in now.keys() - self.files.keys():
            (self.path / key).unlink()
        for key, data in self.files.items():
            if now.get(key) != data:
                (self.path / key).parent.mkdir(parents=True, exist_ok=True)
                (self.path / key).write_bytes(data)


@dataclass
class Tally:
    """How often a damaged file was refused by name or harmless, and all that went wrong."""

    damages: int = 0
    refused: int = 0
    harmless: int = 0
    wrong: list[str] = field(default_factory=list)

    def meet(self, about: object, act: Callable[[], object], intact: object, names: Collection[str]) -> bool:
        """Whether `act` refuses, in one line with one of `names` in it; otherwise it has to give exactly `intact`."""
        try:
            if act() == intact:
                self.harmless += 1
            else:
                self.wrong.append(f"{about}: gives something else")
            return False
        except DDMError as error:
            self.refused += 1
            self.expect(is_line(str(error)) and any(name in str(error) for name in names), f"{about}: says {error!r}")
            return True
        except Exception as error:
            self.wrong.append(f"{about}: ends in {error!r}")
            return False

    def expect(self, holds: bool, what: str) -> None:
        """Note what went wrong, if it did."""
        if not holds:
            self.wrong.append(what)

    def check(self, least: int) -> None:
        """Nothing went wrong, with at least so many damages."""
        assert not self.wrong, "\n".join([f"{len(self.wrong)} in all", *self.wrong[:40]])
        assert self.damages >= least


def is_line(message: object) -> bool:
    """Whether it is a message to people: one line, of bounded length."""
    return isinstance(message, str) and 0 < len(message) < 1000 and message.isprintable()


def images(count: int = 60) -> dict[str, bytes]:
    """Small images of all formats by their names."""
    generator = np.random.default_rng(0)
    kinds = list(GOOD)
    return {
        f"{index:04d}-{kinds[index % len(kinds)]}": GOOD[kinds[index % len(kinds)]](picture(generator, 12, 12))
        for index in range(count)
    }


def write_folder(folder: Path) -> None:
    for index, (name, data) in enumerate(images().items()):
        path = folder / CLASSES[index % len(CLASSES)] / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def write_tar(path: Path, samples: list[tuple[str, dict[str, bytes]]]) -> None:
    with tarfile.open(path, "w") as tar:
        for key, members in samples:
            for extension, content in members.items():
                member = tarfile.TarInfo(f"{key}.{extension}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
