"""Archive: named files in a row, as a plain tar. What is read back is, byte by byte, what was written, or refused."""

import hashlib
import os
import stat
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from ddm_ray.errors import ArchiveError
from ddm_ray.spelling import printable
from ddm_ray.storage.manifest import FileRecord
from ddm_ray.storage.refusals import as_storage_error
from ddm_ray.storage.store import CHUNK

BLOCK = tarfile.BLOCKSIZE
END = bytes(2 * BLOCK)
NAME_LETTERS = tarfile.LENGTH_NAME
"""Letters of a member's name at most, so that its header is one block."""
AGAIN = "pack it again, and copy it whole"
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip",
}


def header(name: str, size: int) -> bytes:
    """The block before a file of `size` bytes: name, size, and nothing of who packed it where and when."""
    member = tarfile.TarInfo(name)
    member.size = size
    return member.tobuf(tarfile.GNU_FORMAT, "ascii", "strict")


def padded(size: int) -> int:
    """Bytes that a file of `size` bytes takes with its header."""
    return BLOCK + size + -size % BLOCK


class ArchiveWriter:
    """An archive that is being written, member by member."""

    def __init__(self, file: BinaryIO, path: Path):
        self._file, self._path = file, path

    def add(self, name: str, data: bytes) -> None:
        """Write a member."""
        self._file.write(header(name, len(data)) + data + bytes(-len(data) % BLOCK))

    def add_fetched(self, name: str, record: FileRecord, fetch: Callable[[Path, int], str]) -> bool:
        """Write a member that `fetch` writes to a path from a byte on; False if that isn't what `record` says.

        `fetch` returns the SHA-256 of what it wrote, in hex.
        """
        self._file.write(header(name, record.bytes))
        self._file.flush()
        begin = self._file.tell()
        digest = fetch(self._path, begin)
        size = self._file.seek(0, os.SEEK_END) - begin
        self._file.write(bytes(-size % BLOCK))
        return FileRecord(size, digest) == record


@contextmanager
def write_archive(path: Path) -> Iterator[ArchiveWriter]:
    """Write an archive to a local file, which has its name once it is whole. Raises StorageError."""
    part = path.with_name(f"{path.name}.{uuid4().hex[:8]}.part")
    with as_storage_error(path):
        try:
            with part.open("xb") as file:
                yield ArchiveWriter(file, part)
                file.write(END)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


class ArchiveReader:
    """An archive that is read in order, each member after it was named. Raises ArchiveError for anything else."""

    def __init__(self, file: BinaryIO, path: Path):
        self._file, self.path, self._offset = file, path, 0
        self._size = os.fstat(file.fileno()).st_size
        begin = self._bytes(max(map(len, _COMPRESSED)))
        for magic, kind in _COMPRESSED.items():
            if begin.startswith(magic):
                raise ArchiveError(f"{path}: is compressed ({kind}), and archives are not", "decompress it first")
        file.seek(0)

    def read(self, name: str, most: int) -> bytes:
        """The content of the next member, which has to have this name, and `most` bytes at most."""
        block = self._bytes(BLOCK)
        size = self._size_of(name, block)
        if size > most:
            raise self.refusal(name, f"says that it has {size} bytes, and may have {most}")
        self._require_header(name, size, block)
        data = self._bytes(size)
        if len(data) < size:
            raise self.refusal(name, "the archive ends within it")
        self._require_zeros(name, size)
        return data

    def require_length(self, records: dict[str, FileRecord]) -> None:
        """Compare the archive's length with that of one of these members beside those that have been read."""
        expected = self._offset + sum(padded(record.bytes) for record in records.values()) + len(END)
        if self._size != expected:
            how = "cut short" if self._size < expected else "more than was packed"
            raise ArchiveError(f"{self.path}: {self._size} bytes, its manifests say {expected}: {how}", AGAIN)

    def verify(self, name: str, record: FileRecord) -> int:
        """The offset of the next member's content, which has to have this name and be what `record` says."""
        self._require_header(name, record.bytes, self._bytes(BLOCK))
        offset = self._offset
        for _ in self.chunks(name, offset, record):
            pass
        self._offset = self._file.tell()
        self._require_zeros(name, record.bytes)
        return offset

    def chunks(self, name: str, offset: int, record: FileRecord) -> Iterator[bytes]:
        """A verified member's content; its last chunk comes once all are what `record` says."""
        self._file.seek(offset)
        digest, left = hashlib.sha256(), record.bytes
        while left:
            with as_storage_error(self.path):
                chunk = self._file.read(min(CHUNK, left))
            if not chunk:
                raise self.refusal(name, "the archive ends within it")
            digest.update(chunk)
            left -= len(chunk)
            if left:
                yield chunk
        if digest.hexdigest() != record.sha256:
            raise self.refusal(name, "its checksum isn't its manifest's")
        if record.bytes:
            yield chunk

    def require_end(self) -> None:
        """Nothing but the end mark may follow."""
        if self._bytes(len(END) + 1) != END:
            raise ArchiveError(f"{self.path}: doesn't end after the files that its manifests name", AGAIN)

    def refusal(self, name: str, reason: str) -> ArchiveError:
        """The error for a member."""
        return ArchiveError(f"{self.path}: {printable(name, NAME_LETTERS)}: {printable(reason, 500)}", AGAIN)

    def _bytes(self, size: int) -> bytes:
        with as_storage_error(self.path):
            data = self._file.read(size)
        self._offset = self._file.tell()
        return data

    def _require_zeros(self, name: str, size: int) -> None:
        gap = -size % BLOCK
        if self._bytes(gap) != bytes(gap):
            raise self.refusal(name, "isn't followed by zeros up to the next block")

    def _require_header(self, name: str, size: int, block: bytes) -> None:
        actual = self._size_of(name, block)
        if actual != size:
            raise self.refusal(name, f"says that it has {actual} bytes, its manifest {size}")
        if block != header(name, size):
            raise self.refusal(name, "its header isn't as packing writes it (owner, mode, time or another field)")

    def _size_of(self, name: str, block: bytes) -> int:
        """The size that a header says, of a regular file of this name."""
        if len(block) < BLOCK or block == bytes(BLOCK):
            raise self.refusal(name, "missing: the archive ends before it")
        try:
            member = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except (tarfile.TarError, ValueError) as error:
            raise self.refusal(name, f"has to come next, and there is no header of a file: {error}") from None
        if member.name != name:
            raise self.refusal(member.name, f"{name} has to come next")
        if member.type != tarfile.REGTYPE or member.size < 0:
            raise self.refusal(name, "isn't a regular file (a link, folder, device, sparse or extended header)")
        return member.size


@contextmanager
def read_archive(path: Path) -> Iterator[ArchiveReader]:
    """Open an archive. Raises ArchiveError."""
    try:
        # Not blocked by a pipe that nobody writes to.
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise ArchiveError(f"{path}: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise ArchiveError(f"{path}: isn't a file")
    with os.fdopen(opened, "rb") as file:
        yield ArchiveReader(file, path)
