"""A finished partition's bytes, and copies of its run to stop, kill or spoil."""

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from ddm_ray.data.partition.file_plan import FilePlan
from ddm_ray.data.partition.made_files import MadeFile, MadeFiles
from ddm_ray.run.graph import PARTITION
from ddm_ray.run.run import Run

NOTES = ["sampling: 1,200", "k-means", "clusters: 600", "clusters: 1,797", "sorting: 1,200", "shard 0", "shard 1"]
"""What the fixture's partition tells in each of its phases."""


def contents(run: Run) -> dict[str, bytes]:
    """The partition's files by their keys below it."""
    return {key: run.store.read(f"{PARTITION}/{key}") for key in run.store.sizes(PARTITION)}


def copy_of(run: Run, path: Path, *without: str) -> Run:
    """A copy of a run on the local disk, without these artifacts."""
    shutil.copytree(run.url, path)
    copy = Run.open(str(path))
    for artifact in without:
        copy.store.delete(artifact)
    return copy


def die_once(flag: str) -> None:
    """End this process by SIGKILL, unless one has met its end here before."""
    with suppress(FileExistsError):
        Path(flag).touch(exist_ok=False)
        os.kill(os.getpid(), signal.SIGKILL)


class DeadlyPlan(FilePlan):
    """A plan whose first reader dies."""

    flag = ""

    def split(self, *args: Any) -> Iterator[tuple[int, pa.Table]]:
        die_once(self.flag)
        return super().split(*args)


class DeadlyFiles(MadeFiles):
    """Files whose first writer dies, once it has written."""

    flag = ""

    def write(self, *args: Any) -> MadeFile | None:
        made = super().write(*args)
        die_once(self.flag)
        return made
