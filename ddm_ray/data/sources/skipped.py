"""Files in a source's folders that aren't its images: of systems, of programs that hide theirs, and of runs."""

import os
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress

from ddm_ray.parsing import parse_object
from ddm_ray.run.run import RUN_FILE

SYSTEM = {
    *("@eadir", "@recycle", "@recently-snapshot", "@sharebin", "#recycle", "#snapshot"),  # network storage
    *("@tmp", "@appstore", "@appdata", "@appconf", "@apphome", "@apptemp", "@database", "@docker"),  # likewise
    *("$recycle.bin", "recycler", "recycled", "system volume information"),  # Windows
    *(f"found.{number:03d}" for number in range(100)),  # likewise, of its checks of disks
    *("__macosx", "network trash folder", "temporary items"),  # macOS
    "lost+found",
}
"""Folders that systems create, in lower case: with thumbnails, snapshots, and files that were deleted."""
SYSTEM_FILES = {"thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r"}
TO_CONVERT = frozenset({".heic", ".heif", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".raf", ".orf", ".rw2"})
"""Extensions of photographs that can't be read."""
RUN_BYTES = 2**22
"""Maximum size of a run's file that is looked at."""

HIDDEN, SYSTEMS, RUNS = "hidden", "in {} (a system's)", "in {} (a run)"
NO_FILES = "pipes, sockets, devices or circular links"
"""Reasons why files are skipped, in words that follow a number."""


def why_skipped(name: str) -> str:
    """Why a file or folder of this name is skipped, with all that is below it, in words for a count; "" if it isn't."""
    if name.casefold() in SYSTEM:
        return SYSTEMS.format(name)
    return HIDDEN if name.startswith(".") or name.casefold() in SYSTEM_FILES else ""


def why_path_skipped(path: str) -> str:
    """Why a file is skipped, by the names of its folders and its own; "" if it isn't."""
    return next((why for part in path.split("/") if part.strip(".") and (why := why_skipped(part))), "")


def why_member_skipped(folder: str, name: str) -> str:
    """Why a member of a tar is skipped. The tar may have been packed below a hidden folder, which says nothing."""
    return why_skipped(next((part for part in folder.split("/") if part.casefold() in SYSTEM), name))


def unread(ignored: Mapping[str, int]) -> tuple[list[str], list[str]]:
    """Lines on files that aren't read, by the reason (`Listing.ignored`): to say if all are hidden, else to warn."""
    counts = sorted(ignored.items(), key=lambda each: -each[1])
    photographs = ", ".join(sorted(TO_CONVERT & ignored.keys()))
    convert = f"; convert the photographs ({photographs}) to JPEG or PNG first" if photographs else ""
    line = f"{sum(ignored.values())} files aren't read: {', '.join(f'{count} {why}' for why, count in counts)}{convert}"
    return ([line], []) if ignored.keys() == {HIDDEN} else ([], [line] if ignored else [])


def is_run(data: bytes) -> bool:
    """True if these are the contents of a run's file."""
    with suppress(ValueError):
        return {"schema", "config"} <= parse_object(data).keys()
    return False


def is_run_folder(folder: str) -> bool:
    """True if a folder on this disk is a run."""
    path = os.path.join(folder, RUN_FILE)
    with suppress(OSError):
        if os.path.getsize(path) <= RUN_BYTES:
            with open(path, "rb") as file:
                return is_run(file.read())
    return False


def count_below(folder: str) -> int:
    """The number of files below a folder on this disk. Links aren't followed."""
    return sum(len(files) for _, _, files in os.walk(folder))


def without_skipped(sizes: dict[str, int], runs: set[str]) -> tuple[dict[str, int], Counter[str]]:
    """The files that aren't skipped, and how many are, by the reason. `runs`: folders below the root that are runs."""
    kept, skipped = dict[str, int](), Counter[str]()
    for path, size in sizes.items():
        within = next((run for run in runs if path.startswith(f"{run}/")), None)
        why = RUNS.format(within) if within else why_path_skipped(path)
        if why:
            skipped[why] += 1
        else:
            kept[path] = size
    return kept, skipped
