"""A finished partition's bytes, and copies of its run to stop, kill or spoil."""

import shutil
from pathlib import Path

from ddm_ray.storage.graph import PARTITION
from ddm_ray.storage.run import Run

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
