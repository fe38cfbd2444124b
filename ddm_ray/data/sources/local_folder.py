"""Files below a folder of this disk, also through links."""

import errno
import os
import stat
from collections import Counter
from collections.abc import Iterator

from ddm_ray.data.sources.skipped import NO_FILES, RUNS, count_below, is_run_folder, why_skipped


def walk_folder(
    folder: str, below: str, above: frozenset[tuple[int, int]], skipped: Counter[str]
) -> Iterator[tuple[str, int]]:
    """Yield files with their sizes. Follows links, except circular ones."""
    status = os.stat(folder)
    identity = (status.st_dev, status.st_ino)
    if identity in above:
        return
    for path, name, size in scan_folder(folder, skipped):
        if size is None:
            yield from walk_folder(path, f"{below}{name}/", above | {identity}, skipped)
        else:
            yield below + name, size


def scan_folder(folder: str, skipped: Counter[str]) -> Iterator[tuple[str, str, int | None]]:
    """Yield path, name in UTF-8, and size (None: a folder) of each entry that isn't skipped.

    A dangling link counts as an empty file.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            name = os.fsencode(entry.name).decode("utf-8", "backslashreplace")
            why = why_skipped(name)
            mode, size = (0, 0) if why else _mode_and_size(entry)
            if stat.S_ISDIR(mode):
                why = RUNS.format(name) if is_run_folder(entry.path) else ""
            elif mode and not stat.S_ISREG(mode):
                why = NO_FILES
            if why:
                skipped[why] += count_below(entry.path) if entry.is_dir(follow_symlinks=False) else 1
            else:
                yield entry.path, name, None if stat.S_ISDIR(mode) else size


def _mode_and_size(entry: os.DirEntry[str]) -> tuple[int, int]:
    """Mode and size of what an entry leads to: zeros for a link to nothing, and a circular link's own mode."""
    try:
        status = entry.stat()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ELOOP):
            raise
        return stat.S_IFLNK if error.errno == errno.ELOOP else 0, 0
    return status.st_mode, status.st_size
