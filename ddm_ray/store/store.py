"""Store: objects by key below one prefix, on a local disk or in an object store, through obstore."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit
from uuid import uuid4

import obstore
import obstore.store
from obstore.exceptions import AlreadyExistsError, BaseError, GenericError
from pyarrow import fs

from ddm_ray.errors import CorruptArtifact, RunError, StorageError
from ddm_ray.store import local_disk
from ddm_ray.store.disk import is_unfinished, put, read_back, require_key
from ddm_ray.store.refusals import as_storage_error, refusal
from ddm_ray.store.retries import SHORT_RETRIES, RetryingClient, RetryPolicy, Undecided, reason

T = TypeVar("T")

CHUNK = 4 * 2**20


class Store:
    """Whole objects below a folder or URI. Writing is atomic and lasting: a reader sees the old object or the new one.

    Keys are relative paths with `/`. Reading a key that isn't there raises FileNotFoundError. StorageError for storage
    that refuses (no permission, no space), or, in an object store, hasn't answered for as long as `retry_policy` lasts.
    """

    def __init__(self, url: str, retry_policy: RetryPolicy = SHORT_RETRIES):
        """`url`: a path, or a URI such as s3://bucket/prefix. Nothing is created. Raises RunError."""
        path = unquote(urlsplit(url).path) if url.startswith("file://") else url
        self.local = Path(path).resolve() if "://" not in path else None
        self.url = str(self.local) if self.local else url.rstrip("/")
        self._objects: obstore.store.ObjectStore
        self._unrepeated: obstore.store.ObjectStore
        if self.local is not None:
            # The root is "/", so that opening a store creates no folder and keys need no escaping.
            self._objects = self._unrepeated = obstore.store.LocalStore()
            self._prefix = self.local.as_posix().lstrip("/") + "/"
            return
        try:
            self._objects = obstore.store.from_url(self.url, retry_config=retry_policy.retry_config())
            # What is in memory is in one store alone.
            self._unrepeated = (
                self._objects
                if isinstance(self._objects, obstore.store.MemoryStore)
                else obstore.store.from_url(self.url, retry_config={"max_retries": 0})
            )
        except (ValueError, BaseError) as error:
            raise RunError(f"{url}: not a storage that can be opened: {refusal(error)}") from None
        self._prefix = ""
        self._client = RetryingClient(self.url, retry_policy)

    def _ask(self, key: str, request: Callable[[], T]) -> T:
        """The answer to a request, which may be made several times. FileNotFoundError stays."""
        where = f"{self.url}/{key}"
        if self.local is not None:
            with as_storage_error(where, kinds=(BaseError,)):
                return request()
        try:
            return self._client.ask(request)
        except BaseError as error:
            raise StorageError(f"{where}: {reason(error)}", passes=self._client.passes(error)) from None

    def read(self, key: str, most: int | None = None, cut: bool = True) -> bytes:
        """The object's bytes, no more than the first `most`; a larger one is refused unless it is to be `cut`.

        That is by CorruptArtifact, as what isn't a regular file, where a local disk has that under the key.
        """

        def within(size: int) -> int:
            if most is None or size <= most:
                return size
            if not cut:
                raise CorruptArtifact(f"{self.url}/{key}: has {size} bytes, and may have {most}")
            return most

        if self.local is not None:
            return local_disk.read(self._path(key), lambda size: range(within(size)))

        def get() -> bytes:
            stored = obstore.get(self._objects, self._prefix + key)
            if within(stored.meta["size"]) < stored.meta["size"]:
                return bytes(obstore.get_range(self._objects, self._prefix + key, start=0, end=most))
            return bytes(stored.bytes())

        return self._ask(key, get)

    def read_end(self, key: str, size: int) -> bytes:
        """The last `size` bytes of the object; all of a smaller one."""
        if self.local is not None:
            return local_disk.read(self._path(key), lambda end: range(max(0, end - size), end))
        end = self._ask(key, lambda: obstore.head(self._objects, self._prefix + key))["size"]
        [data] = self.read_parts(key, [range(max(0, end - size), end)])
        return data

    def read_parts(self, key: str, parts: Sequence[range]) -> list[bytes]:
        """Parts of the object's bytes. Of one that ends before there are fewer bytes, or StorageError is raised."""
        if self.local is not None:
            return [local_disk.read(self._path(key), part) for part in parts]
        starts, ends = [part.start for part in parts], [part.stop for part in parts]
        get = partial(obstore.get_ranges, self._objects, self._prefix + key, starts=starts, ends=ends)
        return [bytes(data) for data in self._ask(key, get)]

    def fetch(self, key: str, path: Path | int) -> str:
        """Copy the object to a local file, a few MiB in memory at a time; the SHA-256 of its bytes, in hex.

        `path`: the file's, or its open descriptor. A failed fetch leaves part of it. Raises FileNotFoundError,
        StorageError, OSError of the local disk.
        """

        def get() -> str:
            digest = hashlib.sha256()
            with open(path, "wb", closefd=not isinstance(path, int)) as file:
                if isinstance(path, int):  # of a try before this one
                    file.truncate(0)
                    file.seek(0)
                for chunk in self._chunks(key):
                    digest.update(chunk)
                    file.write(chunk)
            return digest.hexdigest()

        return self._ask(key, get)

    def read_back(self, key: str) -> str:
        """The SHA-256, in hex, of an object as the local disk has it, not memory. CorruptArtifact if it is gone."""
        path = self._path(key)
        with as_storage_error(f"{self.url}/{key}", missing=CorruptArtifact):
            return read_back(path)

    def _chunks(self, key: str) -> Iterable[Any]:
        """The object's bytes, a few MiB at a time."""
        if self.local is not None:
            return local_disk.chunks(self._path(key), CHUNK)
        return obstore.get(self._objects, self._prefix + key).stream(min_chunk_size=CHUNK)

    def _path(self, key: str) -> Path:
        """The place of an object on a local disk. Raises StorageError for what is no key."""
        assert self.local is not None
        require_key(self._prefix + key, self.url)
        return self.local / key

    def write(self, key: str, data: bytes | memoryview | Path) -> None:
        """Create the object or replace it whole, by bytes or by those of a local file."""
        if self.local is not None:
            self._put(key, _chunks(data) if isinstance(data, Path) else [data])
        else:
            self._ask(key, lambda: obstore.put(self._objects, self._prefix + key, data))

    def write_stream(self, key: str, chunks: Callable[[], Iterable[bytes]]) -> None:
        """Write an object chunk by chunk, with a few MiB in memory; write nothing if `chunks` raises.

        `chunks` is called again where storage took only some of them.
        """
        if self.local is not None:
            self._put(key, chunks())
            return

        def upload() -> None:
            writer = obstore.open_writer(self._objects, self._prefix + key)
            for chunk in chunks():
                self._heed(writer.write, chunk)
            self._heed(writer.close)

        self._ask(key, upload)

    def _heed(self, write: Callable[..., object], *chunk: bytes) -> None:
        """Call a writer's method. Raises GenericError for what an object store refuses, as other requests do."""
        try:
            write(*chunk)
        except OSError as error:
            raise GenericError(str(error)) from None

    def _put(self, key: str, chunks: Iterable[bytes | memoryview], replace: bool = True) -> bool:
        """Write an object on the local disk; False if it exists and isn't to be replaced."""
        path = self._path(key)
        with as_storage_error(f"{self.url}/{key}"):
            return put(path, chunks, replace)

    def create(self, key: str, data: bytes) -> bool:
        """Create the object if it is absent; False if it exists. Of many who try, the store lets one win.

        Where an answer was lost, an object of the same bytes is taken for ours: rivals write different ones.
        """
        unsure = False
        if self.local is not None:
            return self._put(key, [data], replace=False)

        def ask() -> bool:
            nonlocal unsure
            try:
                # Not repeated by obstore: whether a try may have been heeded must be known.
                obstore.put(self._unrepeated, self._prefix + key, data, mode="create", use_multipart=False)
                return True
            except AlreadyExistsError:
                pass
            except BaseError:
                unsure = True
                raise
            # S3 says so, too, while another request for the key is on its way (409), which may come to nothing.
            try:
                stored = bytes(obstore.get(self._objects, self._prefix + key).bytes())
            except FileNotFoundError:
                raise Undecided("storage answers that it exists, and has no such object") from None
            return unsure and stored == data

        return self._ask(key, ask)

    def require_create(self) -> None:
        """Raise StorageError if `create` can't be relied on: in a store that replaces what is to be created only once.

        Creates an object twice, and deletes it; nothing is asked of a local disk.
        """
        if self.local is not None:
            return
        key = f"_probe-{uuid4().hex}"
        self.create(key, b"first")
        again = self.create(key, b"second")
        with suppress(StorageError):  # nobody minds a few bytes
            self.delete_one(key)
        if again:
            raise StorageError(
                f"{self.url}: this storage ignores If-None-Match, so two owners of one job would spoil each other's"
                " work; choose one that knows conditional writes, as S3, GCS, Azure, R2 and new versions of MinIO do",
                passes=False,
            )

    def exists(self, key: str) -> bool:
        """True if there is an object under this very key."""
        if self.local is not None:
            return local_disk.exists(self._path(key))
        with suppress(FileNotFoundError):
            self._ask(key, lambda: obstore.head(self._objects, self._prefix + key))
            return True
        return False

    def is_folder(self, key: str) -> bool:
        """True if a folder of the local disk is there, which `sizes` has as a file where it can't be listed."""
        return self.local is not None and self._path(key).is_dir()

    def sizes(self, prefix: str) -> Mapping[str, int]:
        """Size in bytes of every object below `prefix/`, by key relative to it, in order; empty: of all."""
        if self.local is not None:
            return local_disk.sizes(self._path(prefix) if prefix else self.local)
        base = f"{self._prefix}{prefix}/" if prefix else self._prefix
        pages = partial(obstore.list, self._objects, prefix=base)
        listed = self._ask(prefix, lambda: {each["path"]: each["size"] for page in pages() for each in page})
        return {path.removeprefix(base): listed[path] for path in sorted(listed)}

    def folders(self, prefix: str) -> list[str]:
        """Names of the folders directly below `prefix/`, in order."""
        if self.local is not None:
            return local_disk.folders(self._path(prefix))
        base = f"{self._prefix}{prefix}/"
        listing = self._ask(prefix, lambda: obstore.list_with_delimiter(self._objects, prefix=base))
        return sorted(path.removeprefix(base).rstrip("/") for path in listing["common_prefixes"])

    def delete(self, prefix: str) -> None:
        """Delete every object below `prefix/`."""
        if self.local is not None:
            local_disk.delete(self.local / prefix)  # object by object would leave empty folders
            return
        for key in self.sizes(prefix):
            self.delete_one(f"{prefix}/{key}")

    def delete_one(self, key: str) -> None:
        """Delete the object under this very key, if there is one."""
        with suppress(FileNotFoundError):
            self._ask(key, lambda: obstore.delete(self._objects, self._prefix + key))

    def delete_unfinished(self, key: str) -> None:
        """Delete a file that a killed writer left on the local disk, which no other method takes for an object."""
        assert self.local is not None and is_unfinished(key.rpartition("/")[2])
        with as_storage_error(f"{self.url}/{key}"):
            (self.local / key).unlink(missing_ok=True)

    def filesystem(self, key: str) -> tuple[fs.FileSystem, str]:
        """A pyarrow file system and the key's path on it, for libraries that write by themselves."""
        if self.local is not None:
            return fs.LocalFileSystem(), str(self.local / key)
        return fs.FileSystem.from_uri(f"{self.url}/{key}")


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            yield chunk


def is_local(url: str) -> bool:
    """True if a run's name is a path on this machine, not a URI."""
    return "://" not in url
