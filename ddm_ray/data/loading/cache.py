"""Files of an artifact on a local disk, verified: the run's own, or copies of objects in a store."""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from uuid import uuid4

from ddm_ray.data.loading.verified import Stamp, VerifiedFile, stamp_of
from ddm_ray.data.scratch import OTHER_CACHE, close_to_others, own_folder
from ddm_ray.errors import CorruptArtifact
from ddm_ray.run.graph import Artifact
from ddm_ray.run.manifest import FileRecord, Manifest
from ddm_ray.run.run import Run
from ddm_ray.store.disk import inode, locked
from ddm_ray.store.refusals import as_storage_error, temporary_folder

SIDE_BY_SIDE = 4


@contextmanager
def local_files(run: Run, manifest: Manifest, names: Sequence[str], cache: str | None) -> Iterator[list[VerifiedFile]]:
    """Provide an artifact's files for the context's duration; each is read or fetched once to verify it.

    A file that another process of this user has verified, and that was unchanged for two seconds then, isn't read
    again for this.

    Copies are readable by this user only. They go to a folder named by the artifact's digest below `cache`, where they
    stay for later use; without `cache`, below the system's temporary folder, until the last process that uses them
    exits. Concurrent processes share one copy. Raises CorruptArtifact naming the file, StorageError.
    """
    if run.store.local is not None:

        def place(name: str) -> Path:  # the store resolves it: a shard's files may lie in several runs
            return Path(run.store.filesystem(f"{manifest.artifact}/{name}")[1])

        yield _each(names, lambda name: _verified(run, manifest, name, place(name)))
        return
    root = cache_root(cache)
    folder = root / manifest.digest
    with _as_cache_error(folder):
        (root if cache else root.parent).mkdir(parents=True, exist_ok=True)
        if not cache:
            own_folder(root)
    with _in_use(folder, temporary=cache is None):
        with _as_cache_error(folder):
            for parent in sorted({parent for name in names for parent in (folder / name).parents}):
                if parent.is_relative_to(folder):
                    own_folder(parent, shared=cache is not None)
            files = _each(names, lambda name: _fetched(run, manifest, name, folder / name))
        yield files


def cache_root(cache: str | None) -> Path:
    """The folder below which copies lie, each artifact's in a folder named by its digest."""
    return Path(cache) if cache else Path(temporary_folder()) / f"ddm-ray-{os.geteuid()}"


def _notes() -> Path:
    """The folder of notes on verified files."""
    return cache_root(None) / "verified"


def _each(names: Sequence[str], obtain: Callable[[str], VerifiedFile]) -> list[VerifiedFile]:
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        futures = [pool.submit(obtain, name) for name in names]
        try:
            return [future.result() for future in futures]
        finally:
            pool.shutdown(cancel_futures=True)


def _verified(run: Run, manifest: Manifest, name: str, path: Path) -> VerifiedFile:
    file = VerifiedFile(path, manifest.files[name], partial(_differing, run, manifest, name))
    try:
        file.verify_once(_notes())
    except FileNotFoundError:
        raise _gone(run, manifest, name) from None
    except OSError:
        with as_storage_error(f"{run.url}/{manifest.artifact}/{name}"):
            raise
    return file


def _fetched(run: Run, manifest: Manifest, name: str, path: Path) -> VerifiedFile:
    """The verified copy at `path`; fetched if it isn't there."""
    refuse = partial(_differing, run, manifest, name)
    while True:
        seen = inode(path)
        if seen is not None:
            copy = VerifiedFile(path, manifest.files[name], refuse, follow=False)
            with suppress(OSError):  # not possible on some file systems, and on read-only volumes
                close_to_others(path)
            with suppress(CorruptArtifact, OSError):
                copy.verify_once(_notes())
                return copy
        with locked(path.with_name(f"{path.name}.lock"), fcntl.LOCK_EX):
            if inode(path) != seen:
                continue  # another process made it meanwhile
            for left in path.parent.glob(f"{path.name}.*.part"):  # left by killed processes
                left.unlink()
            stamp = _fetch(run, manifest, name, path)
            return VerifiedFile(path, manifest.files[name], refuse, follow=False, stamp=stamp)


def _fetch(run: Run, manifest: Manifest, name: str, path: Path) -> Stamp:
    """Fetch the copy; it gets its name once it is verified."""
    part = path.with_name(f"{path.name}.{uuid4().hex}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            digest = run.store.fetch(f"{manifest.artifact}/{name}", descriptor)
        except FileNotFoundError:
            raise _gone(run, manifest, name) from None
        record = FileRecord(os.fstat(descriptor).st_size, digest)
        if record != manifest.files[name]:
            raise _differing(run, manifest, name, record)
        part.replace(path)
        return stamp_of(descriptor)
    finally:
        os.close(descriptor)
        part.unlink(missing_ok=True)


def _differing(run: Run, manifest: Manifest, name: str, record: FileRecord | None) -> CorruptArtifact:
    """The error for a file with this record; None: it isn't a file."""
    expected = manifest.files[name]
    if record is None:
        what = "isn't a file"
    elif record.bytes != expected.bytes:
        what = f"{record.bytes} bytes, its manifest says {expected.bytes}"
    else:
        what = "checksum differs from its manifest's"
    return CorruptArtifact(f"{run.url}/{manifest.artifact}/{name}: {what}", run.mend(Artifact(manifest.artifact)))


def _gone(run: Run, manifest: Manifest, name: str) -> CorruptArtifact:
    where = f"{run.url}/{manifest.artifact}/{name}"
    return CorruptArtifact(f"{where}: gone, though its manifest lists it", run.mend(Artifact(manifest.artifact)))


@contextmanager
def _in_use(folder: Path, temporary: bool) -> Iterator[None]:
    """Remove a temporary folder when the last process leaves it; after a kill, the next process removes it."""
    if not temporary:
        yield
        return
    lock = folder.with_name(f"{folder.name}.lock")
    with ExitStack() as held:
        with _as_cache_error(folder):
            for other in {*folder.parent.glob("*.lock")} - {lock}:
                with suppress(OSError), locked(other, fcntl.LOCK_EX | fcntl.LOCK_NB):
                    shutil.rmtree(other.with_suffix(""), ignore_errors=True)
                    other.unlink()
            descriptor = held.enter_context(locked(lock, fcntl.LOCK_SH))
        try:
            yield
        finally:
            with suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
                lock.unlink()


def _as_cache_error(folder: Path) -> AbstractContextManager[None]:
    return as_storage_error(folder, OTHER_CACHE)
