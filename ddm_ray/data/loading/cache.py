"""Files of an artifact on a local disk: where the run lies, or copies of what is in an object store; all verified."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from ddm_ray.data.scratch import inode, locked
from ddm_ray.errors import CorruptArtifact, StorageError, as_storage_error
from ddm_ray.storage.graph import Artifact
from ddm_ray.storage.manifest import FileRecord, Manifest
from ddm_ray.storage.run import Run

SIDE_BY_SIDE = 4


@contextmanager
def local_files(run: Run, manifest: Manifest, names: Sequence[str], cache: str | None) -> Iterator[list[Path]]:
    """Paths of an artifact's files, each read or fetched once to verify it, for as long as the context lasts.

    Copies go to a folder of the artifact's digest below `cache`, where they stay and are used again; without one,
    below the system's temporary folder, until the last process here that uses them is done. Processes that want
    the same copy at once make one. Raises CorruptArtifact naming the file, StorageError.
    """
    if run.store.local is not None:
        folder = run.store.local / manifest.artifact
        _each(names, lambda name: _verified(run, manifest, name, folder / name))
        yield [folder / name for name in names]
        return
    root = cache_root(cache)
    folder = root / manifest.digest
    with _as_cache_error(folder):
        root.mkdir(parents=True, exist_ok=True)
    with _in_use(folder, temporary=cache is None):
        with _as_cache_error(folder):
            for name in names:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
            _each(names, lambda name: _fetched(run, manifest, name, folder / name))
        yield [folder / name for name in names]


def cache_root(cache: str | None) -> Path:
    """The folder below which copies lie, each artifact's in one named by its digest."""
    return Path(cache) if cache else Path(tempfile.gettempdir()) / f"ddm-ray-{os.getuid()}"


def _each(names: Sequence[str], obtain: Callable[[str], None]) -> None:
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        futures = [pool.submit(obtain, name) for name in names]
        try:
            for future in futures:
                future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _verified(run: Run, manifest: Manifest, name: str, path: Path) -> None:
    where = f"{run.url}/{manifest.artifact}/{name}"
    try:
        record = FileRecord.of_file(path)
    except FileNotFoundError:
        raise _gone(run, manifest, where) from None
    except OSError as error:
        raise StorageError(f"{where}: {error.strerror}") from None
    _compare(run, manifest, name, record)


def _fetched(run: Run, manifest: Manifest, name: str, path: Path) -> None:
    """Make `path` the verified copy, if it isn't yet."""
    while True:
        seen = inode(path)
        if seen is not None and FileRecord.of_file(path) == manifest.files[name]:
            return
        with locked(path.with_name(f"{path.name}.lock"), fcntl.LOCK_EX):
            if inode(path) != seen:
                continue  # another process made it meanwhile
            key, part = f"{manifest.artifact}/{name}", path.with_name(f"{path.name}.part")
            try:
                digest = run.store.fetch(key, part)
            except FileNotFoundError:
                raise _gone(run, manifest, f"{run.url}/{key}") from None
            _compare(run, manifest, name, FileRecord(part.stat().st_size, digest))
            part.replace(path)
            return


def _compare(run: Run, manifest: Manifest, name: str, record: FileRecord) -> None:
    expected = manifest.files[name]
    if record == expected:
        return
    what = "checksum differs from its manifest's"
    if record.bytes != expected.bytes:
        what = f"{record.bytes} bytes, its manifest says {expected.bytes}"
    raise CorruptArtifact(f"{run.url}/{manifest.artifact}/{name}: {what}", run.remake(Artifact(manifest.artifact)))


def _gone(run: Run, manifest: Manifest, where: str) -> CorruptArtifact:
    return CorruptArtifact(f"{where}: gone, though its manifest lists it", run.remake(Artifact(manifest.artifact)))


@contextmanager
def _in_use(folder: Path, temporary: bool) -> Iterator[None]:
    """A temporary folder is removed by whoever is the last to leave it."""
    if not temporary:
        yield
        return
    lock = folder.with_name(f"{folder.name}.lock")
    with locked(lock, fcntl.LOCK_SH) as descriptor:
        try:
            yield
        finally:
            with suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
                lock.unlink()


def _as_cache_error(folder: Path) -> AbstractContextManager[None]:
    return as_storage_error(folder, "choose another folder with `cache`")
