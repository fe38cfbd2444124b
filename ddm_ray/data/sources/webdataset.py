"""WebDataset tars: consecutive members of one key are a sample, their extensions say what they are."""

import json
import tarfile
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import IO, Any, cast

from pyarrow import NativeFile

from ddm_ray.data.images import EXTENSIONS, rejection
from ddm_ray.data.reasons import CUT
from ddm_ray.data.sources.chunks import Encoded, EncodedChunk, Unit, chunked
from ddm_ray.data.sources.conditions import Conditions
from ddm_ray.data.sources.files import Files, as_source_error
from ddm_ray.errors import refusal

TEXT_KEYS = ("caption", "text")
CLASS_KEYS = ("label", "cls", "class")
_PIECE = 2**18
# Raised by tarfile at odd headers, beside its own errors.
_ODD = (ValueError, OverflowError, KeyError, RecursionError)


def read(
    files: Files, unit: Unit, chunk_rows: int, skip: Container[int], conditions: Conditions
) -> Iterator[EncodedChunk]:
    """The chunks of one tar, in one pass over a stream of it. A tar that ends early ends in a row that says so."""
    (path,), (size,) = unit.files, unit.sizes
    files.check(path, size)
    with as_source_error(files.where(path)), files.open(path) as stream:
        yield from chunked(_rows(_Counted(stream), path, size, conditions), chunk_rows, skip)


class _Counted:
    """A stream that counts the bytes read from it."""

    def __init__(self, stream: NativeFile):
        self._stream = stream
        self.place = 0

    def read(self, size: int) -> bytes:
        piece = self._stream.read(size)
        self.place += len(piece)
        return piece


@dataclass
class _Sample:
    key: str
    members: dict[str, bytes | None] = field(default_factory=dict)  # no content: not needed, or none


def _rows(stream: _Counted, path: str, size: int, conditions: Conditions) -> Iterator[tuple[Encoded, float]]:
    counts: dict[str, int] = {}
    try:
        for sample in _samples(stream, conditions):
            counts[sample.key] = counts.get(sample.key, 0) + 1
            row = _row(f"{path}/{sample.key}", sample.members, conditions)
            if counts[sample.key] > 1:
                # No other row has this id: a key's last name has no dot in it.
                row = Encoded(f"{row.id}….{counts[sample.key]}", None, None, "its key comes twice in the tar")
            yield row, min(1.0, stream.place / max(1, size))
    except tarfile.TarError as error:
        problem = f"{CUT} and the rest lost, at or before byte {stream.place} of {size}: {refusal(error)}"
        yield Encoded(f"{path}/….end", None, None, problem), 1.0


def _samples(stream: _Counted, conditions: Conditions) -> Iterator[_Sample]:
    """Samples in the tar's order. A tar that ends early gives its whole samples, then raises tarfile.TarError."""
    sample: _Sample | None = None
    try:
        for key, extension, content in _members(stream, conditions):
            if sample is not None and (sample.key != key or extension in sample.members):
                yield sample
                sample = None
            sample = sample or _Sample(key)
            sample.members[extension] = content
    except tarfile.TarError:
        if sample is not None:
            yield sample
        raise
    if sample is not None:
        yield sample


def _members(stream: _Counted, conditions: Conditions) -> Iterator[tuple[str, str, bytes | None]]:
    """Key, extension and content of all files in a tar; no content for links, devices and what isn't needed."""
    try:
        with tarfile.open(
            fileobj=cast(IO[bytes], stream),
            mode="r|",
            bufsize=_PIECE,
            tarinfo=_Header,
            encoding="utf-8",
            errors="backslashreplace",
        ) as tar:
            while (member := tar.next()) is not None:
                tar.members = []  # type: ignore[attr-defined]  # it would remember them all
                folder, _, name = member.name.removeprefix("./").rpartition("/")
                base, _, extension = name.partition(".")
                # WebDataset's own rule: __something__ is about the tar.
                if member.isdir() or not base or (base.startswith("__") and base.endswith("__")):
                    continue
                needed = member.isfile() and _needed(extension.lower(), conditions)
                opened = tar.extractfile(member) if needed else None
                yield (
                    _utf8(f"{folder}/{base}" if folder else base),
                    extension.lower(),
                    opened.read() if opened else None,
                )
            _nothing_follows(tar)
    except _ODD as error:
        raise tarfile.ReadError(f"{type(error).__name__}: {error}") from None


def _needed(extension: str, conditions: Conditions) -> bool:
    """True if a member of this extension may hold a sample's image or condition."""
    image = conditions.config.image_column
    if extension == image.lower() if image else extension in EXTENSIONS:
        return True
    return conditions.needed and extension in (_plain(conditions), "json")


def _plain(conditions: Conditions) -> str:
    """Extension of members that are a condition as a plain text."""
    chosen = conditions.config.condition_column
    return chosen.lower() if chosen else "txt" if conditions.captions else "cls"


def _utf8(name: str) -> str:
    return name.encode("utf-8", "backslashreplace").decode()


def _nothing_follows(tar: tarfile.TarFile) -> None:
    """Raises tarfile.ReadError for data, or more zeros than padding, after the end: holes of a partial download."""
    source: Any = tar.fileobj
    while piece := source.read(_PIECE):
        if any(piece):
            raise tarfile.ReadError("something follows its end")
    if (zeros := source.tell() - tar.offset) >= 2 * tarfile.BLOCKSIZE + tarfile.RECORDSIZE:
        raise tarfile.ReadError(f"its last {zeros} bytes are zeros")


class _Header(tarfile.TarInfo):
    """A member's header; a damaged or missing one is an error rather than the end of the tar."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "_Header":
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"{error} where a member or the end should be") from None


def _row(row_id: str, members: dict[str, bytes | None], conditions: Conditions) -> Encoded:
    try:
        return Encoded(row_id, _image(members, conditions), conditions.of(_stated(members, conditions)))
    except ValueError as problem:
        return Encoded(row_id, None, None, str(problem))


def _image(members: dict[str, bytes | None], conditions: Conditions) -> bytes:
    chosen = conditions.config.image_column
    names = [name for name in members if (name == chosen.lower() if chosen else name in EXTENSIONS)]
    if len(names) > 1:
        raise ValueError(f"several images: {', '.join(names)}; data.image_column chooses one")
    image = members[names[0]] if names else None
    if image is None:
        raise ValueError(f"no image among {', '.join(sorted(members))}"[:120])
    return image


def _stated(members: dict[str, bytes | None], conditions: Conditions) -> object:
    """The label, class name or caption that a sample states; None if none."""
    if not conditions.needed:
        return None
    chosen, plain = conditions.config.condition_column, _plain(conditions)
    if plain != "json" and (content := members.get(plain)) is not None:
        text = _text(content, plain).strip()
        return text if conditions.captions or not text.lstrip("+-").isdecimal() else int(text)
    if (content := members.get("json")) is None:
        return None
    try:
        fields = json.loads(_text(content, "json"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its json can't be read: {rejection(error)}") from None
    keys = (chosen,) if chosen and chosen != "json" else TEXT_KEYS if conditions.captions else CLASS_KEYS
    if not isinstance(fields, dict):
        raise ValueError("its json has no fields")
    return next((fields[key] for key in keys if fields.get(key) is not None), None)


def _text(content: bytes, extension: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise ValueError(f"its {extension} is not UTF-8") from None
