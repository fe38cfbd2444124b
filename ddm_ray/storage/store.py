"""Store: objects by key below one prefix, on a local disk or in an object store, through obstore."""

import errno
import hashlib
import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

import obstore
import obstore.store
from obstore.exceptions import AlreadyExistsError
from pyarrow import fs

from ddm_ray.errors import RunError, StorageError, as_storage_error, refusal

# Errors of opening a store, beside FileNotFoundError: no such bucket, no such kind of storage, a bad name.
StoreFailure = (StorageError, obstore.exceptions.BaseError, ValueError)

CHUNK = 4 * 2**20


class Store:
    """Whole objects below a folder or URI. Writing is atomic and lasting: a reader sees the old object or the new one.

    Keys are relative paths with `/`. Reading a key that isn't there raises FileNotFoundError.
    """

    def __init__(self, url: str):
        """`url`: a path, or a URI such as s3://bucket/prefix. Nothing is created. Raises RunError."""
        path = unquote(urlsplit(url).path) if url.startswith("file://") else url
        self.local = Path(path).resolve() if "://" not in path else None
        self.url = str(self.local) if self.local else url.rstrip("/")
        self._objects: obstore.store.ObjectStore
        if self.local is not None:
            # The root is "/", so that opening a store creates no folder and keys need no escaping.
            self._objects = obstore.store.LocalStore()
            self._prefix = self.local.as_posix().lstrip("/") + "/"
            return
        try:
            self._objects = obstore.store.from_url(self.url)
        except (ValueError, obstore.exceptions.BaseError) as error:
            raise RunError(f"{url}: not a storage that can be opened: {refusal(error)}") from None
        self._prefix = ""

    def _refusals(self, key: str) -> AbstractContextManager[None]:
        """Turn refusals (no permission, no space, no network) into a StorageError; FileNotFoundError stays."""
        return as_storage_error(f"{self.url}/{key}", kinds=(obstore.exceptions.BaseError,))

    def read(self, key: str, most: int | None = None) -> bytes:
        """The object's bytes, no more than the first `most`."""
        with self._refusals(key):
            stored = obstore.get(self._objects, self._prefix + key)
            if most is not None and stored.meta["size"] > most:
                return bytes(obstore.get_range(self._objects, self._prefix + key, start=0, end=most))
            return bytes(stored.bytes())

    def fetch(self, key: str, path: Path) -> str:
        """Copy the object to a local file, a few MiB in memory at a time; the SHA-256 of its bytes, in hex.

        A failed fetch leaves part of it. Raises FileNotFoundError, StorageError, OSError of the local disk.
        """
        digest = hashlib.sha256()
        with self._refusals(key), path.open("wb") as file:
            for chunk in obstore.get(self._objects, self._prefix + key).stream(min_chunk_size=CHUNK):
                digest.update(chunk)
                file.write(chunk)
        return digest.hexdigest()

    def write(self, key: str, data: bytes | memoryview | Path) -> None:
        """Create the object or replace it whole, by bytes or by those of a local file."""
        with self._refusals(key):
            obstore.put(self._objects, self._prefix + key, data)
        self._sync(key)

    def write_stream(self, key: str, chunks: Iterable[bytes]) -> None:
        """Write an object chunk by chunk, with a few MiB in memory; write nothing if `chunks` raises."""
        with self._refusals(key):
            writer = obstore.open_writer(self._objects, self._prefix + key)
            for chunk in chunks:
                writer.write(chunk)
            writer.close()
        self._sync(key)

    def create(self, key: str, data: bytes) -> bool:
        """Create the object if it is absent; False if it exists. Of many who try, the store lets one win."""
        with self._refusals(key):
            try:
                obstore.put(self._objects, self._prefix + key, data, mode="create", use_multipart=False)
            except AlreadyExistsError:
                return False
        self._sync(key)
        return True

    def _sync(self, key: str) -> None:
        """Wait until a local object outlives a power cut: what a manifest names must be there if the manifest is."""
        if self.local is None:
            return
        path = self.local / key
        for place in (path, path.parent):
            try:
                opened = os.open(place, os.O_RDONLY)
            except FileNotFoundError:
                return  # another writer deleted it meanwhile
            try:
                os.fsync(opened)
            except OSError as error:
                raise StorageError(f"{place}: {error.strerror}") from None
            finally:
                os.close(opened)

    def exists(self, key: str) -> bool:
        """True if there is an object under this very key."""
        try:
            with self._refusals(key):
                obstore.head(self._objects, self._prefix + key)
        except FileNotFoundError:
            return False
        return True

    def sizes(self, prefix: str) -> Mapping[str, int]:
        """Size in bytes of every object below `prefix/`, by key relative to it, in order of the keys."""
        base = f"{self._prefix}{prefix}/"
        with self._refusals(prefix):
            listing = obstore.list(self._objects, prefix=base).collect()
        return {entry["path"].removeprefix(base): entry["size"] for entry in sorted(listing, key=lambda e: e["path"])}

    def folders(self, prefix: str) -> list[str]:
        """Names of the folders directly below `prefix/`, in order."""
        base = f"{self._prefix}{prefix}/"
        with self._refusals(prefix):
            listing = obstore.list_with_delimiter(self._objects, prefix=base)
        return sorted(path.removeprefix(base).rstrip("/") for path in listing["common_prefixes"])

    def delete(self, prefix: str) -> None:
        """Delete every object below `prefix/`."""
        if self.local is not None:
            shutil.rmtree(self.local / prefix, onerror=_unless_concurrent)  # object by object would leave empty folders
            return
        for key in self.sizes(prefix):
            self.delete_one(f"{prefix}/{key}")

    def delete_one(self, key: str) -> None:
        """Delete the object under this very key, if there is one."""
        with suppress(FileNotFoundError), self._refusals(key):
            obstore.delete(self._objects, self._prefix + key)

    def filesystem(self, key: str) -> tuple[fs.FileSystem, str]:
        """A pyarrow file system and the key's path on it, for libraries that write by themselves."""
        if self.local is not None:
            return fs.LocalFileSystem(), str(self.local / key)
        return fs.FileSystem.from_uri(f"{self.url}/{key}")


def _unless_concurrent(_: object, where: str, info: tuple[type, BaseException, object]) -> None:
    """Pass over what is gone already, and folders that another writer fills meanwhile."""
    error = info[1]
    assert isinstance(error, OSError)
    if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ENOTEMPTY):
        raise StorageError(f"{where}: {error.strerror}") from None


def is_local(url: str) -> bool:
    """True if a run's name is a path on this machine, not a URI."""
    return "://" not in url
