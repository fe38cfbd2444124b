"""WebDataset tars: consecutive members with one key form a sample; their extensions tell their roles."""

import json
import re
import tarfile
from collections import Counter
from collections.abc import Container, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import IO, Any, cast

from pyarrow import NativeFile

from ddm_ray.data.images import EXTENSIONS, rejection
from ddm_ray.data.reasons import CUT
from ddm_ray.data.sources.chunks import IMAGE_BYTES, Encoded, EncodedChunk, Unit, chunked
from ddm_ray.data.sources.collection import Collection, Format
from ddm_ray.data.sources.collection import extension as extension_of
from ddm_ray.data.sources.conditions import CLASS_KEYS, TEXT_KEYS, Conditions
from ddm_ray.data.sources.files import as_source_error
from ddm_ray.data.sources.skipped import unread, why_member_skipped
from ddm_ray.errors import DataError
from ddm_ray.plain_text import from_utf8, stripped
from ddm_ray.spelling import some
from ddm_ray.store.refusals import refusal

TWICE = "its key comes twice in the tar: pack it sorted: `find FOLDER -type f | LC_ALL=C sort | tar -cf NEW.tar -T -`"
JOINED = "another archive follows its end, as after `cat`; keep them apart, or join them by `tar -Af A.tar B.tar`"
LINK = "a link, which isn't read; pack a copy without links, of `cp -rL FOLDER COPY`"
PACKERS = {b"\x1f\x8b": "gzip", b"\xfd7zXZ\0": "xz", b"(\xb5/\xfd": "zstd"}
"""Programs by the first bytes of what they compress. No member's name begins so."""
STATED_BYTES = 4 * 2**20
"""Maximum size of a member that states a condition."""
HEADER_BYTES = 2**18
"""Maximum size of what may precede a member's header: a long name, or pax fields."""
Rows = Iterator[tuple[Encoded, float]]
_BEFORE_MEMBERS = {
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
}
_PIECE = 2**18
_NUMBERED = re.compile(r"[\W_]*\d[\W\d_]*\.\w+")
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
            counted = _Counted(stream, files.where(path))
            rows = _with_skipped(_rows(counted, path, size, source.conditions), counted.skipped, path)
            yield from chunked(rows, source.chunk_rows, skip)


class _Counted:
    """A tar that counts the bytes read from it. `skipped`: pictures in it that are skipped, by the reason."""

    def __init__(self, stream: NativeFile, where: str):
        self._stream, self.where, self.place, self.skipped = stream, where, 0, Counter[str]()

    def read(self, size: int) -> bytes:
        piece: bytes = self._stream.read(size)
        if self.place == 0 and (packer := next((PACKERS[start] for start in PACKERS if piece.startswith(start)), None)):
            raise DataError(f"{self.where}: is compressed by {packer}, not a tar; unpack it by {packer} -d")
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


def _with_skipped(rows: Rows, skipped: Counter[str], path: str) -> Rows:
    """The rows of a tar, of which the last one has a remark on what the tar has besides and isn't read."""
    last: Encoded | None = None
    for row, share in rows:
        if last:
            yield last, share
        last = row
    if skipped:
        remark = f"of its tar, {next(filter(None, unread(skipped)))[0]}"
        last = replace(last, remark=remark) if last else Encoded(f"{path}/….skipped", None, None, remark)
    if last:
        yield last, 1.0


def _rows(stream: _Counted, path: str, size: int, conditions: Conditions) -> Rows:
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
                why = "" if misnamed or member.isdir() else why_member_skipped(folder, name)
                if why and extension_of(name) in EXTENSIONS:
                    stream.skipped[why] += 1
                # A rule of WebDataset: members named __something__ describe the tar.
                if why or member.isdir() or not base or (base.startswith("__") and base.endswith("__")):
                    continue
                before, key = key, _utf8(f"{folder}/{base}" if folder else base)
                key_bytes = key_bytes if key == before else 0
                content: bytes | _Refused | None = None
                if misnamed:
                    content, misnamed = _Refused(f"its name or header has more than {HEADER_BYTES} bytes"), False
                elif (member.issym() or member.islnk()) and _needed(extension, conditions):
                    content = _Refused(f"its {extension} is {LINK}")
                elif member.isfile() and _needed(extension, conditions):
                    key_bytes += member.size
                    limit = IMAGE_BYTES if _is_image(extension, conditions) else STATED_BYTES
                    content = _content(tar, member, extension, limit, IMAGE_BYTES - key_bytes, size)
                yield key, extension, content
            _nothing_follows(tar, stream.where)
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
    return _is_image(extension, conditions) or (conditions.needed and extension.lower() in (_plain(conditions), "json"))


def _is_image(extension: str, conditions: Conditions) -> bool:
    chosen = conditions.config.image_column
    return extension.lower() == chosen.lower() if chosen else extension.lower() in EXTENSIONS


def _plain(conditions: Conditions) -> str:
    """Extension of members that hold a condition as plain text."""
    chosen = conditions.config.condition_column
    return chosen.lower() if chosen else "txt" if conditions.captions else "cls"


def _utf8(name: str) -> str:
    return name.encode("utf-8", "backslashreplace").decode()


def _nothing_follows(tar: tarfile.TarFile, where: str) -> None:
    """Raises tarfile.ReadError for data, or more zeros than padding, after the end; DataError for another archive."""
    source: Any = tar.fileobj
    end, most = 2 * tarfile.BLOCKSIZE, 2 * tarfile.BLOCKSIZE + tarfile.RECORDSIZE
    while piece := source.read(_PIECE):
        if data := piece.lstrip(b"\0"):
            start = (len(piece) - len(data)) // tarfile.BLOCKSIZE * tarfile.BLOCKSIZE
            with suppress(tarfile.HeaderError):  # if it's no header
                tarfile.TarInfo.frombuf(piece[start : start + tarfile.BLOCKSIZE], "utf-8", "replace")
                if end <= source.tell() - len(piece) + start - tar.offset < most:
                    raise DataError(f"{where}: {JOINED}")
            raise tarfile.ReadError("something follows its end")
    if (zeros := source.tell() - tar.offset) >= most:
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

    Beside `a.png`, `a.2.png` is another picture. `a.mask_0.png` isn't: an extension with letters tells its role.
    """
    own = [name for name in sample.members if _is_image(name, conditions)]
    others = [name for name in sample.members if name not in own and extension_of(name) in EXTENSIONS]
    if own:
        chosen = conditions.config.image_column
        others = [name for name in others if not chosen and _NUMBERED.fullmatch(name)]
    if len(own + others) < 2:
        return [_row(row_id, sample, conditions)]
    key = row_id.rpartition("/")[2]
    problem = f"several images: {', '.join(own)}; data.image_column chooses one"
    if len({name.lower() for name in own}) < len(own):
        problem = f"several images differ in case alone: {', '.join(own)}; rename all but one"
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
        problem = f"no image among {', '.join(sorted(members))}"[:120]
        pictures = [name for name in members if "." in name and extension_of(name) in EXTENSIONS]
        if pictures and not conditions.config.image_column:
            problem += f"; a key ends at the first dot of a name: data.image_column={pictures[0]} chooses one"
        raise ValueError(problem)
    return image


def _stated(members: dict[str, bytes | None], conditions: Conditions) -> object:
    """The label, class name or caption that a sample states; None if it states none."""
    if not conditions.needed:
        return None
    chosen, plain = conditions.config.condition_column, _plain(conditions)
    members = {name.lower(): content for name, content in members.items()}
    if plain != "json" and (content := members.get(plain)) is not None:
        text = stripped(_text(content, plain))
        return text if conditions.captions else conditions.number_or_name(text)
    if (content := members.get("json")) is None:
        return None
    try:
        fields = json.loads(_text(content, "json"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its json can't be read: {rejection(error)}") from None
    keys = (chosen,) if chosen and chosen != "json" else TEXT_KEYS if conditions.captions else CLASS_KEYS
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
