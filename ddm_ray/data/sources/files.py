"""Files of a source below its root: on a disk, in an S3-compatible store, or on the Hugging Face hub."""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from functools import cache, cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pyarrow import NativeFile, fs

from ddm_ray.data.sources.local_folder import scan_folder, walk_folder
from ddm_ray.data.sources.patterns import expand_braces, is_wild, regular
from ddm_ray.data.sources.registry import SOURCES
from ddm_ray.data.sources.skipped import RUN_BYTES, RUNS, is_run, is_run_folder, why_skipped, without_skipped
from ddm_ray.errors import DataError
from ddm_ray.plain_text import LFS_POINTER, NOT_FETCHED
from ddm_ray.run.run import RUN_FILE
from ddm_ray.spelling import closest_match
from ddm_ray.store.local_disk import path_of
from ddm_ray.store.refusals import as_storage_error

MISNAMED = "its name is not UTF-8; rename it"
HUB = "hf://datasets/"
_BUFFER = 2**20
_POINTER_BYTES = 1024
THREADS = 16
_ESCAPED = re.compile(rb"\\x([89a-f][0-9a-f])")
Listed = Sequence[tuple[str, int | None]]
_QUERY = re.compile(r"\?(\w+=[^/]*)$")


class Files:
    """Files below a folder or prefix, or those that match a pattern (`*`, `?`, `{000..127}`, `{a,b}`) or name.

    Storage is opened on first use, and pickling keeps only the URL. Raises DataError for a URL of no known storage.
    """

    def __init__(self, url: str):
        self.url = url
        local = local_path(url)
        scheme, _, path = url.partition("://")
        self._query = ""
        if local is not None:
            self.remote = False
            # Absolute from the start, since workers have other current folders.
            path = self.url = str(Path(local).expanduser().absolute())
        elif scheme == "s3":
            self.remote = True
            if match := _QUERY.search(path):
                self._query, path = match.group(0), path[: match.start()]
            if not path.partition("/")[0]:
                raise DataError(f"data.source {url!r} names no bucket: s3://BUCKET/PREFIX")
        elif url.startswith(HUB):
            self.remote = True
            path = path.rstrip("/")
            if len([name for name in path.split("/")[1:3] if name]) < 2:
                raise DataError(f"data.source {url!r} names no data set: hf://datasets/OWNER/NAME")
        else:
            raise DataError(f"data.source {url!r}: {scheme}:// is no source; give {_forms()}")
        self.scheme = scheme if self.remote else "file"
        self._path = path.rstrip("/")

    def __reduce__(self) -> tuple[Any, ...]:
        return Files, (self.url,)

    @property
    def root(self) -> str:
        """The folder or prefix that paths are relative to, without a slash at its end."""
        return self._split[0]

    @cached_property
    def _split(self) -> tuple[str, list[str], bool]:
        """The root, names of files below it (empty: all files), and whether these are patterns."""
        names = self._path.split("/")
        if is_wild(self._path) and (self.remote or not os.path.exists(self._path)):
            first = next(place for place, name in enumerate(names) if is_wild(name))
            return "/".join(names[:first]), expand_braces("/".join(names[first:])), True
        with as_source_error(self.url):
            alone = self.filesystem.get_file_info(self._path or "/").type == fs.FileType.File
        return ("/".join(names[:-1]), names[-1:], False) if alone else (self._path, [], False)

    @cached_property
    def filesystem(self) -> fs.FileSystem:
        """The storage, through pyarrow."""
        if self.scheme == "file":
            return fs.LocalFileSystem()
        with as_source_error(self.url):
            if self.scheme == "s3":
                bucket = self._path.partition("/")[0]
                return fs.FileSystem.from_uri(f"s3://{bucket}{self._query or _endpoint()}")[0]
            from huggingface_hub import HfFileSystem

            # A shared instance would cache listings, which may have changed since.
            hub = HfFileSystem(endpoint=os.environ.get("HF_ENDPOINT"), skip_instance_cache=True)
            return fs.PyFileSystem(fs.FSSpecHandler(hub))

    def sizes(self, skipped: Counter[str] | None = None) -> dict[str, int]:
        """Size in bytes of every file by its path below the root, sorted by path.

        Files that hide, belong to a system or to a run (see `skipped`) are left out, and counted in `skipped` by the
        reason. Bytes of a name that aren't UTF-8 are escaped. Raises DataError if the root doesn't exist or is a run,
        or a file that the pattern names literally is missing; StorageError.
        """
        root, names, patterns = self._split
        with as_source_error(self.url):
            if not self.remote and not os.path.isdir(root or "/"):
                raise DataError(f"data.source {self.url!r}: no such folder or file; give {_forms()}{_near(self._path)}")
            if self.remote and self.filesystem.get_file_info(root).type == fs.FileType.NotFound:
                raise DataError(f"data.source {self.url!r}: nothing there, or it needs credentials")
            if not names and (self._runs("", self._sizes_of([RUN_FILE])) if self.remote else is_run_folder(root)):
                raise DataError(f"data.source {self.url!r} is a run; give the folder of its images")
            skipped = Counter() if skipped is None else skipped
            sizes = self._matching(skipped) if names or patterns else self._below("", skipped)
        return dict(sorted(sizes.items()))

    def open(self, path: str) -> NativeFile:
        """Open a stream of a file's bytes."""
        return self.filesystem.open_input_stream(self._full(path), compression=None, buffer_size=_BUFFER)

    def open_anywhere(self, path: str) -> NativeFile:
        """Open a file for random access."""
        return self.filesystem.open_input_file(self._full(path))

    def read(self, path: str, size: int) -> bytes:
        """A file's bytes, at most `size` + 1 of them: one more than listed shows that the file has grown."""
        content = b""
        with self.filesystem.open_input_stream(self._full(path), compression=None) as stream:
            while len(content) <= size and (piece := stream.read(size + 1 - len(content))):
                content += piece
        return content

    def check(self, path: str, size: int) -> None:
        """Raises DataError if a file isn't as it was listed."""
        where = self.where(path)
        with as_source_error(where):
            info = self.filesystem.get_file_info(self._full(path))
            if info.type != fs.FileType.File:
                self.check_missing(path)
        again = "if that is right, delete RUN/rows to begin again"
        if info.type != fs.FileType.File:
            gone = MISNAMED if self.misnamed(path) else self.dangling(path) or f"gone since it was listed; {again}"
            raise DataError(f"{where}: {gone}")
        if info.size != size:
            raise DataError(f"{where}: changed since it was listed, from {size} to {info.size} bytes; {again}")
        with as_source_error(where):
            if size < _POINTER_BYTES and self.read(path, size).startswith(LFS_POINTER):
                raise DataError(f"{where}: {NOT_FETCHED}")

    def check_missing(self, path: str) -> None:
        """Raises DataError if more than this file is missing: its class folder is gone or empty, or a remote root."""
        if self.misnamed(path):
            return
        if not self.remote:
            folder = self._full(path.partition("/")[0] if "/" in path else "")
            if not os.path.isdir(folder) or not any(True for _ in scan_folder(folder, Counter())):
                raise self.lost(folder)
        elif self.filesystem.get_file_info(self.root).type == fs.FileType.NotFound or (
            # A bucket exists even if it is empty.
            "/" not in self.root and not self.filesystem.get_file_info(fs.FileSelector(self.root))
        ):
            raise self.lost(f"{self.scheme}://{self.root}")

    def lost(self, what: str) -> DataError:
        """The error for a source that has vanished, or lost much, since it was listed."""
        again = "put it back" if self.remote else "mount it again"
        return DataError(
            f"{what}: isn't there any more; {again}, then the same command goes on; or delete RUN/rows to begin again"
        )

    def dangling(self, path: str) -> str:
        """Words on a file that is a link to nothing, and on what mends it; "" if it is none."""
        full = self._full(path)
        if self.remote or not os.path.islink(full):
            return ""
        target = os.readlink(full)
        fix = "fetch it: git annex get" if "/annex/objects/" in target else "mount it again"
        return f"links to {target}, which isn't there any more; {fix}"

    def misnamed(self, path: str) -> bool:
        """True if a file's name isn't UTF-8, so that it was listed under an escaped name."""
        name = os.fsencode(path)
        raw = _ESCAPED.sub(lambda match: bytes([int(match[1], 16)]), name)
        return not self.remote and raw != name and os.path.lexists(os.fsencode(self.root) + b"/" + raw)

    def where(self, path: str) -> str:
        """A file's name for messages."""
        return f"{self.root}/{path}" if self.scheme == "file" else f"{self.scheme}://{self.root}/{path}"

    def _full(self, path: str) -> str:
        return f"{self.root}/{path}".rstrip("/") or "/"

    def _matching(self, skipped: Counter[str]) -> dict[str, int]:
        _, names, patterns = self._split
        plain = [name for name in names if not (patterns and is_wild(name))]
        sizes = self._sizes_of(plain)
        if missing := next((name for name in plain if name not in sizes), None):
            raise DataError(f"data.source {self.url!r}: {missing} is missing")
        listed = cache(lambda folder: self._directly_in(folder, skipped))
        within = cache(lambda folder, part: self._folders_in(folder, part, listed(folder), skipped))
        for name in names:
            if name not in sizes:
                sizes |= self._search("", name.split("/"), listed, within, skipped)
        if not sizes:
            raise DataError(f"data.source {self.url!r}: no file there matches")
        return sizes

    def _sizes_of(self, paths: list[str]) -> dict[str, int]:
        """Sizes of those of these files that are there."""
        with ThreadPoolExecutor(THREADS if self.remote else 1) as pool:
            infos = pool.map(lambda path: self.filesystem.get_file_info(self._full(path)), paths)
        return {path: info.size for path, info in zip(paths, infos, strict=True) if info.type == fs.FileType.File}

    def _search(
        self,
        folder: str,
        parts: list[str],
        listed: Callable[[str], Listed],
        within: Callable[[str, str], Sequence[str]],
        skipped: Counter[str],
    ) -> Iterator[tuple[str, int]]:
        """Yield files below a folder ("" or ending in a slash) that match a pattern's parts, at most as deep."""
        part, *rest = parts
        if rest and not is_wild(part):
            yield from self._search(f"{folder}{part}/", rest, listed, within, skipped)
            return
        if rest and part.endswith("**"):
            matches = regular("/".join(parts)).fullmatch
            yield from ((folder + path, size) for path, size in self._below(folder, skipped).items() if matches(path))
            return
        for name in within(folder, part) if rest else ():
            yield from self._search(f"{folder}{name}/", rest, listed, within, skipped)
        for name, size in () if rest else listed(folder):
            if size is not None and regular(part).fullmatch(name):
                yield folder + name, size

    def _below(self, folder: str, skipped: Counter[str]) -> dict[str, int]:
        """Size of every file below a folder by its path; empty if there is no such folder."""
        full = self._full(folder)
        if not self.remote:
            return dict(walk_folder(full, "", frozenset(), skipped)) if os.path.isdir(full) else {}
        listing = self.filesystem.get_file_info(fs.FileSelector(full, recursive=True, allow_not_found=True))
        files = {entry.path[len(full) + 1 :]: entry.size for entry in listing if entry.type == fs.FileType.File}
        kept, others = without_skipped(files, self._runs(folder, files))
        skipped += others
        return kept

    def _runs(self, folder: str, files: Mapping[str, int]) -> set[str]:
        """Folders among files of a remote storage that are runs."""
        small = [path for path, size in files.items() if path.rpartition("/")[2] == RUN_FILE and size <= RUN_BYTES]
        return {path.rpartition("/")[0] for path in small if is_run(self.read(f"{folder}{path}", files[path]))}

    def _directly_in(self, folder: str, skipped: Counter[str]) -> Listed:
        """Names in a folder, with sizes of files; empty if there is none. A bucket's skipped folder counts as one."""
        full = self._full(folder)
        if not self.remote:
            return [(name, size) for _, name, size in scan_folder(full, skipped)] if os.path.isdir(full) else []
        listing = self.filesystem.get_file_info(fs.FileSelector(full, allow_not_found=True))
        sizes = {entry.base_name: entry.size if entry.type == fs.FileType.File else None for entry in listing}
        skipped.update(why for name in sizes if (why := why_skipped(name)))
        return [(name, size) for name, size in sizes.items() if not why_skipped(name)]

    def _folders_in(self, folder: str, part: str, listed: Listed, skipped: Counter[str]) -> list[str]:
        """Folders of a listing that match a pattern's part and aren't runs."""
        names = [name for name, size in listed if size is None and regular(part).fullmatch(name)]
        runs = self._runs("", self._sizes_of([f"{folder}{name}/{RUN_FILE}" for name in names if self.remote]))
        skipped.update(RUNS.format(run.rpartition("/")[2]) for run in runs)
        return [name for name in names if f"{folder}{name}" not in runs]


def local_path(source: str) -> str | None:
    """The path on this disk that a source's name stands for; None for another URI. Raises DataError for a wrong one."""
    try:
        return path_of(source)
    except ValueError as error:
        raise DataError(f"data.source {source!r}: {error}") from None


def as_source_error(where: str) -> AbstractContextManager[None]:
    """Turn storage errors into errors of one line: DataError for missing files, StorageError for the rest."""
    return as_storage_error(where, kinds=refusals(where), missing=DataError)


def refusals(where: str) -> tuple[type[Exception], ...]:
    """Exceptions that storage raises. The hub's connections raise their own."""
    if not where.startswith(HUB):
        return (OSError,)
    from huggingface_hub.errors import HTTPError

    return (OSError, HTTPError)


def _endpoint() -> str:
    """URL query for an S3-compatible endpoint from the AWS tools' environment variables, which pyarrow ignores."""
    url = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if not url:
        return ""
    scheme, _, host = url.rpartition("://")
    return f"?scheme={scheme or 'https'}&endpoint_override={quote(host.rstrip('/'), safe='')}"


def _forms() -> str:
    """Describe all forms of `data.source`."""
    *others, last = (form for name in SOURCES for form in SOURCES[name].forms)
    return f"a folder, a URI (s3://BUCKET/..., hf://datasets/OWNER/NAME), {', '.join(others)} or {last}"


def _near(path: str) -> str:
    """Suggest the entry of the nearest existing folder, or the named source, that a path may have meant."""
    folder, _, name = path.rpartition("/")
    if os.path.isdir(folder or "/"):
        with suppress(OSError):
            beside = [entry for entry in os.listdir(folder or "/") if not why_skipped(entry)]
            guess = closest_match(name, [*beside, *SOURCES])
            if guess is not None:
                return f"; did you mean {f'{folder}/{guess}' if guess in beside else SOURCES[guess].forms[0]}?"
            return ""
    return _near(folder) if folder else ""
