"""Store: objects by key below one prefix, on a local disk or in an object store, through obstore."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
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
# obstore opens more, as az:// and s3a://, but Arrow, by which Ray Train writes, doesn't know these. memory: tests.
SCHEMES = ("s3", "gs", "abfss", "memory")
WHERE = "give a folder, s3://BUCKET/..., gs://BUCKET/... or abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/..."


class Store:
    """Whole objects below a folder or URI. Writes are atomic and durable: a reader sees the old object or the new one.

    Keys are relative paths with `/`. Reading an absent key raises FileNotFoundError. Methods raise StorageError if
    storage refuses (no permission, no space), or if an object store doesn't answer for as long as `retry_policy` lasts.
    """

    def __init__(self, url: str, retry_policy: RetryPolicy = SHORT_RETRIES):
        """`url` is a path, or a URI such as s3://bucket/prefix. Nothing is created. Raises RunError."""
        try:
            path = local_disk.path_of(url)
        except ValueError as error:
            raise RunError(f"{url}: {error}") from None
        self.local = Path(path).resolve() if path is not None else None
        self.url = str(self.local) if self.local else url.rstrip("/")
        self._objects: obstore.store.ObjectStore
        self._unrepeated: obstore.store.ObjectStore
        if self.local is not None:
            # The root is "/", so that opening a store creates no folder, and keys need no escaping.
            self._objects = self._unrepeated = obstore.store.LocalStore()
            self._prefix = self.local.as_posix().lstrip("/") + "/"
            return
        if url.partition("://")[0] not in SCHEMES:
            raise RunError(f"{url}: no run can lie there; {WHERE}")
        try:
            self._objects = obstore.store.from_url(self.url, retry_config=retry_policy.retry_config())
            # A second MemoryStore would not see the objects of the first.
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
        """The answer to a request, which may be made several times. FileNotFoundError is passed on."""
        where = f"{self.url}/{key}"
        if self.local is not None:
            with as_storage_error(where, kinds=(BaseError,)):
                return request()
        try:
            return self._client.ask(request)
        except BaseError as error:
            raise StorageError(f"{where}: {reason(error)}", passes=self._client.passes(error)) from None

    def read(self, key: str, most: int | None = None, cut: bool = True) -> bytes:
        """The object's bytes, the first `most` at most. Without `cut`, a larger object raises CorruptArtifact.

        On a local disk anything that isn't a regular file raises CorruptArtifact, too.
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
        """The last `size` bytes of the object, or all of a smaller one."""
        if self.local is not None:
            return local_disk.read(self._path(key), lambda end: range(max(0, end - size), end))
        end = self._ask(key, lambda: obstore.head(self._objects, self._prefix + key))["size"]
        [data] = self.read_parts(key, [range(max(0, end - size), end)])
        return data

    def read_parts(self, key: str, parts: Sequence[range]) -> list[bytes]:
        """Parts of the object's bytes. If the object ends earlier, they are shorter, or StorageError is raised."""
        if self.local is not None:
            return [local_disk.read(self._path(key), part) for part in parts]
        starts, ends = [part.start for part in parts], [part.stop for part in parts]
        get = partial(obstore.get_ranges, self._objects, self._prefix + key, starts=starts, ends=ends)
        return [bytes(data) for data in self._ask(key, get)]

    def fetch(self, key: str, path: Path | int) -> str:
        """Copy the object to a local file and return the SHA-256 of its bytes, in hex.

        A few MiB are in memory at a time. `path`: the file's path, or its open descriptor. A failed fetch leaves an
        incomplete file. Raises FileNotFoundError, StorageError, and OSError of the local disk.
        """

        def get() -> str:
            digest = hashlib.sha256()
            with open(path, "wb", closefd=not isinstance(path, int)) as file:
                if isinstance(path, int):  # an earlier try may have written to it
                    file.truncate(0)
                    file.seek(0)
                for chunk in self._chunks(key):
                    digest.update(chunk)
                    file.write(chunk)
            return digest.hexdigest()

        return self._ask(key, get)

    def read_back(self, key: str) -> str:
        """The SHA-256 of an object, in hex, read from the local disk and not from the page cache.

        Raises CorruptArtifact if the object is gone.
        """
        path = self._path(key)
        with as_storage_error(f"{self.url}/{key}", missing=CorruptArtifact):
            return read_back(path)

    def _chunks(self, key: str) -> Iterable[Any]:
        """The object's bytes, a few MiB at a time."""
        if self.local is not None:
            return local_disk.chunks(self._path(key), CHUNK)
        return obstore.get(self._objects, self._prefix + key).stream(min_chunk_size=CHUNK)

    def _path(self, key: str) -> Path:
        """The path of an object on a local disk. Raises StorageError for an invalid key."""
        assert self.local is not None
        require_key(self._prefix + key, self.url)
        return self.local / key

    def write(self, key: str, data: bytes | memoryview | Path) -> None:
        """Create the object or replace it whole, from bytes or from a local file."""
        if self.local is not None:
            self._put(key, _chunks(data) if isinstance(data, Path) else [data])
        else:
            self._ask(key, lambda: obstore.put(self._objects, self._prefix + key, data))

    def write_stream(self, key: str, chunks: Callable[[], Iterable[bytes]]) -> None:
        """Write an object chunk by chunk, with a few MiB in memory. If `chunks` raises, nothing is written.

        `chunks` is called again if an upload is repeated.
        """
        if self.local is not None:
            self._put(key, chunks())
            return

        def upload() -> None:
            writer = obstore.open_writer(self._objects, self._prefix + key)
            for chunk in chunks():
                self._call(writer.write, chunk)
            self._call(writer.close)

        self._ask(key, upload)

    def _call(self, write: Callable[..., object], *chunk: bytes) -> None:
        """Call a writer's method. A refusal of the object store raises GenericError, as in other requests."""
        try:
            write(*chunk)
        except OSError as error:
            raise GenericError(str(error)) from None

    def _put(self, key: str, chunks: Iterable[bytes | memoryview], replace: bool = True) -> bool:
        """Write an object on the local disk; return False if it exists and `replace` is false."""
        path = self._path(key)
        with as_storage_error(f"{self.url}/{key}"):
            return put(path, chunks, replace)

    def create(self, key: str, data: bytes) -> bool:
        """Create the object if it is absent; return False if it exists. If several processes try, one succeeds.

        If a response was lost, an object with the same bytes counts as ours, since rivals write different bytes.
        """
        unsure = False
        if self.local is not None:
            return self._put(key, [data], replace=False)

        def ask() -> bool:
            nonlocal unsure
            try:
                # obstore must not repeat it: we have to know whether an earlier try may have succeeded.
                obstore.put(self._unrepeated, self._prefix + key, data, mode="create", use_multipart=False)
                return True
            except AlreadyExistsError:
                pass
            except BaseError:
                unsure = True
                raise
            # S3 also says so (409) while another request for the key is under way, and that one may fail.
            try:
                stored = bytes(obstore.get(self._objects, self._prefix + key).bytes())
            except FileNotFoundError:
                raise Undecided("storage answers that it exists, and has no such object") from None
            return unsure and stored == data

        return self._ask(key, ask)

    def require_create(self) -> None:
        """Raise StorageError if `create` replaces an object that exists, as in stores without conditional writes.

        The check creates an object twice and deletes it. On a local disk it does nothing.
        """
        if self.local is not None:
            return
        key = f"_probe-{uuid4().hex}"
        self.create(key, b"first")
        again = self.create(key, b"second")
        with suppress(StorageError):  # a few bytes left behind do no harm
            self.delete_one(key)
        if again:
            raise StorageError(
                f"{self.url}: this storage ignores If-None-Match, so two owners of one job would spoil each other's"
                " work; choose one that knows conditional writes, as S3, GCS, Azure, R2 and new versions of MinIO do",
                passes=False,
            )

    def exists(self, key: str) -> bool:
        """True if there is an object under exactly this key."""
        if self.local is not None:
            return local_disk.exists(self._path(key))
        with suppress(FileNotFoundError):
            self._ask(key, lambda: obstore.head(self._objects, self._prefix + key))
            return True
        return False

    def is_folder(self, key: str) -> bool:
        """True if the key is a folder on the local disk; `sizes` shows one that can't be listed as a file."""
        return self.local is not None and self._path(key).is_dir()

    def sizes(self, prefix: str) -> Mapping[str, int]:
        """Size in bytes of every object below `prefix/`, by relative key, sorted. An empty prefix means all objects."""
        if self.local is not None:
            return local_disk.list_sizes(self._path(prefix) if prefix else self.local)
        base = f"{self._prefix}{prefix}/" if prefix else self._prefix
        pages = partial(obstore.list, self._objects, prefix=base)
        listed = self._ask(prefix, lambda: {each["path"]: each["size"] for page in pages() for each in page})
        return {path.removeprefix(base): listed[path] for path in sorted(listed)}

    def folders(self, prefix: str) -> list[str]:
        """Sorted names of the folders directly below `prefix/`."""
        if self.local is not None:
            return local_disk.folders(self._path(prefix))
        base = f"{self._prefix}{prefix}/"
        listing = self._ask(prefix, lambda: obstore.list_with_delimiter(self._objects, prefix=base))
        return sorted(path.removeprefix(base).rstrip("/") for path in listing["common_prefixes"])

    def delete(self, prefix: str) -> None:
        """Delete every object below `prefix/`."""
        if self.local is not None:
            local_disk.delete_folder(self.local / prefix)  # object by object would leave empty folders
            return
        for key in self.sizes(prefix):
            self.delete_one(f"{prefix}/{key}")

    def delete_one(self, key: str) -> None:
        """Delete the object under exactly this key, if there is one."""
        with suppress(FileNotFoundError):
            self._ask(key, lambda: obstore.delete(self._objects, self._prefix + key))

    def delete_unfinished(self, key: str) -> None:
        """Delete an unfinished file of a killed writer on the local disk. No other method sees such files."""
        assert self.local is not None and is_unfinished(key.rpartition("/")[2])
        with as_storage_error(f"{self.url}/{key}"):
            (self.local / key).unlink(missing_ok=True)

    def filesystem(self, key: str) -> tuple[fs.FileSystem, str]:
        """A pyarrow file system and the key's path on it, for libraries that do their own writing."""
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
