"""WebDataset tars: consecutive members with one key form a sample; their extensions tell their roles."""

import json
import tarfile
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import IO, Any, cast

from pyarrow import NativeFile

from ddm_ray.data.images import EXTENSIONS, rejection
from ddm_ray.data.reasons import CUT
from ddm_ray.data.sources.chunks import IMAGE_BYTES, Encoded, EncodedChunk, Unit, chunked
from ddm_ray.data.sources.collection import Collection, Format
from ddm_ray.data.sources.collection import extension as extension_of
from ddm_ray.data.sources.conditions import Conditions
from ddm_ray.data.sources.files import as_source_error
from ddm_ray.plain_text import from_utf8, stripped
from ddm_ray.spelling import some
from ddm_ray.store.refusals import refusal

TWICE = "its key comes twice in the tar: pack it sorted: `find FOLDER -type f | LC_ALL=C sort | tar -cf NEW.tar -T -`"
STATED_BYTES = 4 * 2**20
"""Maximum size of a member that states a condition."""
HEADER_BYTES = 2**18
"""Maximum size of what may precede a member's header: a long name, or pax fields."""
_BEFORE_MEMBERS = {
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
}
_PIECE = 2**18
# tarfile raises these for odd headers, besides its own errors.
_ODD = (ValueError, OverflowError, KeyError, RecursionError)


class WebDataset(Format):
    """See Format. A tar is read in one pass as a stream. One that ends early gives a last row that says so."""

    plural = "tars"
    about = "WebDataset tars: of each sample an image, and its class or caption as .cls, .txt or .json"
    extensions = frozenset({"tar"})

    def read(self, source: Collection, unit: Unit, skip: Container[int]) -> Iterator[EncodedChunk]:
        """See Format."""
        files, (path,), (size,) = source.files, unit.files, unit.sizes
        files.check(path, size)
        with as_source_error(files.where(path)), files.open(path) as stream:
            rows = _rows(_Counted(stream), path, size, source.conditions)
            yield from chunked(rows, source.chunk_rows, skip)


class _Counted:
    """A stream that counts the bytes read from it."""

    def __init__(self, stream: NativeFile):
        self._stream, self.place = stream, 0

    def read(self, size: int) -> bytes:
        piece = self._stream.read(size)
        self.place += len(piece)
        return piece


@dataclass(frozen=True)
class _Refused:
    """A member that isn't read, and the reason."""

    problem: str


@dataclass
class _Sample:
    key: str
    members: dict[str, bytes | None] = field(default_factory=dict)  # None: without content, or not needed
    problem: str | None = None


def _rows(stream: _Counted, path: str, size: int, conditions: Conditions) -> Iterator[tuple[Encoded, float]]:
    counts: dict[str, int] = {}
    try:
        for sample in _samples(stream, size, conditions):
            counts[sample.key] = counts.get(sample.key, 0) + 1
            for row in _rows_of(f"{path}/{sample.key}", sample, conditions):
                if counts[sample.key] > 1:
                    # The id is unique: the last part of a key has no dot in it.
                    row = Encoded(f"{row.id}….{counts[sample.key]}", None, None, TWICE)
                yield row, min(1.0, stream.place / max(1, size))
    except tarfile.TarError as error:
        problem = f"{CUT} and the rest lost, at or before byte {stream.place} of {size}: {refusal(error)}"
        yield Encoded(f"{path}/….end", None, None, problem), 1.0


def _samples(stream: _Counted, size: int, conditions: Conditions) -> Iterator[_Sample]:
    """Yield samples in the tar's order. A tar that ends early gives its complete samples, then tarfile.TarError."""
    sample: _Sample | None = None
    try:
        for key, extension, content in _members(stream, size, conditions):
            if sample is not None and (sample.key != key or extension in sample.members):
                yield sample
                sample = None
            sample = sample or _Sample(key)
            if isinstance(content, _Refused):
                sample.problem, content = sample.problem or content.problem, None
            sample.members[extension] = content
    except tarfile.TarError:
        if sample is not None:
            yield sample
        raise
    if sample is not None:
        yield sample


def _members(stream: _Counted, size: int, conditions: Conditions) -> Iterator[tuple[str, str, bytes | _Refused | None]]:
    """Yield key, extension and content of all files in a tar; None for links, devices and files that aren't needed."""
    key, key_bytes, misnamed = "", 0, False
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
                # The tar object would keep all members in memory.
                tar.members, tar.pax_headers = [], {}  # type: ignore[attr-defined]
                if member.too_long:  # type: ignore[attr-defined]
                    misnamed = True
                    continue
                folder, _, name = member.name.removeprefix("./").rpartition("/")
                base, _, extension = name.partition(".")
                base = base or ("…" if misnamed else "")
                # A rule of WebDataset: members named __something__ describe the tar.
                if member.isdir() or not base or (base.startswith("__") and base.endswith("__")):
                    continue
                before, key, extension = key, _utf8(f"{folder}/{base}" if folder else base), extension.lower()
                key_bytes = key_bytes if key == before else 0
                content: bytes | _Refused | None = None
                if misnamed:
                    content, misnamed = _Refused(f"its name or header has more than {HEADER_BYTES} bytes"), False
                elif member.isfile() and _needed(extension, conditions):
                    key_bytes += member.size
                    limit = IMAGE_BYTES if _is_image(extension, conditions) else STATED_BYTES
                    content = _content(tar, member, extension, limit, IMAGE_BYTES - key_bytes, size)
                yield key, extension, content
            _nothing_follows(tar)
    except _ODD as error:
        raise tarfile.ReadError(f"{type(error).__name__}: {error}") from None


def _content(
    tar: tarfile.TarFile, member: tarfile.TarInfo, extension: str, limit: int, left: int, size: int
) -> bytes | _Refused | None:
    """The content of a member of a tar of `size` bytes, unless it exceeds `limit`, or `left` is below 0."""
    if member.issparse():
        return _Refused(f"its {extension} is a sparse file, which isn't read; pack it without holes")
    if not 0 <= member.size <= size - member.offset_data:
        raise tarfile.ReadError("unexpected end of data")
    if member.size > limit:
        return _Refused(f"its {extension} has {member.size} bytes, more than {limit}")
    if left < 0:
        return _Refused(f"its members have more than {IMAGE_BYTES} bytes")
    opened = tar.extractfile(member)
    return opened.read() if opened else None


def _needed(extension: str, conditions: Conditions) -> bool:
    """True if a member of this extension may hold a sample's image or condition."""
    return _is_image(extension, conditions) or (conditions.needed and extension in (_plain(conditions), "json"))


def _is_image(extension: str, conditions: Conditions) -> bool:
    chosen = conditions.config.image_column
    return extension == chosen.lower() if chosen else extension in EXTENSIONS


def _plain(conditions: Conditions) -> str:
    """Extension of members that hold a condition as plain text."""
    chosen = conditions.config.condition_column
    return chosen.lower() if chosen else "txt" if conditions.captions else "cls"


def _utf8(name: str) -> str:
    return name.encode("utf-8", "backslashreplace").decode()


def _nothing_follows(tar: tarfile.TarFile) -> None:
    """Raises tarfile.ReadError for data, or more zeros than padding, after the end: gaps of a partial download."""
    source: Any = tar.fileobj
    while piece := source.read(_PIECE):
        if any(piece):
            raise tarfile.ReadError("something follows its end")
    if (zeros := source.tell() - tar.offset) >= 2 * tarfile.BLOCKSIZE + tarfile.RECORDSIZE:
        raise tarfile.ReadError(f"its last {zeros} bytes are zeros")


class _Header(tarfile.TarInfo):
    """A member's header; a damaged or missing one is an error rather than the end of the tar.

    A name or field larger than HEADER_BYTES isn't read into memory: it is passed on as a member with `too_long` set.
    """

    too_long = False

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "_Header":
        try:
            header = super().frombuf(buf, encoding, errors)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"{error} where a member or the end should be") from None
        if header.type in _BEFORE_MEMBERS and header.size > HEADER_BYTES:
            header.type, header.too_long = tarfile.REGTYPE, True
        return header

    def _proc_sparse(self, tar: Any) -> "_Header":
        """Skip the map of a sparse file's parts, without keeping it."""
        _, goes_on, _ = self._sparse_structs  # type: ignore[attr-defined]
        while goes_on:
            block = tar.fileobj.read(tarfile.BLOCKSIZE)
            goes_on = len(block) == tarfile.BLOCKSIZE and block[504]
        self.sparse = b""
        self.offset_data = tar.fileobj.tell()
        tar.offset = self.offset_data + self._block(self.size)  # type: ignore[attr-defined]
        return self

    def _proc_gnusparse_10(self, following: "_Header", fields: object, tar: object) -> None:
        """Leave the map, which starts the content, to be skipped with it."""
        following.sparse = b""


def _rows_of(row_id: str, sample: _Sample, conditions: Conditions) -> list[Encoded]:
    """The row of a sample, and one of each other picture of its key, as a loss; all are losses if none can be chosen.

    Beside `a.png`, `a.2.png` is another picture. `a.mask.png` isn't: an extension of words tells a member's role.
    """
    own = [name for name in sample.members if _is_image(name, conditions)]
    others = [name for name in sample.members if name not in own and extension_of(name) in EXTENSIONS]
    if own:
        chosen = conditions.config.image_column
        others = [name for name in others if not chosen and any(map(str.isdigit, name.rpartition(".")[0]))]
    if len(own + others) < 2:
        return [_row(row_id, sample, conditions)]
    key = row_id.rpartition("/")[2]
    problem = f"several images: {', '.join(own)}; data.image_column chooses one"
    if others:
        problem = f"several images have the key {key!r}, which ends at the first dot of a name: {some(own + others)}"
    rows = [Encoded(f"{row_id}.{name}", None, None, sample.problem or problem) for name in own + others]
    return [_row(row_id, sample, conditions), *rows[1:]] if len(own) == 1 and not sample.problem else rows


def _row(row_id: str, sample: _Sample, conditions: Conditions) -> Encoded:
    members = sample.members
    if sample.problem is not None:
        return Encoded(row_id, None, None, sample.problem)
    try:
        return Encoded(row_id, _image(members, conditions), conditions.of(_stated(members, conditions)))
    except ValueError as problem:
        return Encoded(row_id, None, None, str(problem))


def _image(members: dict[str, bytes | None], conditions: Conditions) -> bytes:
    image = next((content for name, content in members.items() if _is_image(name, conditions)), None)
    if image is None:
        raise ValueError(f"no image among {', '.join(sorted(members))}"[:120])
    return image


def _stated(members: dict[str, bytes | None], conditions: Conditions) -> object:
    """The label, class name or caption that a sample states; None if it states none."""
    if not conditions.needed:
        return None
    chosen, plain = conditions.config.condition_column, _plain(conditions)
    if plain != "json" and (content := members.get(plain)) is not None:
        text = stripped(_text(content, plain))
        return text if conditions.captions else conditions.number_or_name(text)
    if (content := members.get("json")) is None:
        return None
    try:
        fields = json.loads(_text(content, "json"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its json can't be read: {rejection(error)}") from None
    keys = (chosen,) if chosen and chosen != "json" else conditions.usual
    if not isinstance(fields, dict):
        raise ValueError("its json has no fields")
    if fields and not set(keys) & fields.keys():
        what, names = "caption" if conditions.captions else "label", some([f"{key!r:.40}" for key in fields])
        raise ValueError(f"no {what} among {names} of its json; data.condition_column=NAME chooses one")
    return next((fields[key] for key in keys if fields.get(key) is not None), None)


def _text(content: bytes, extension: str) -> str:
    try:
        return from_utf8(content)
    except UnicodeDecodeError:
        raise ValueError(f"its {extension} is not UTF-8") from None
