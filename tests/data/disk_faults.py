"""A stage, without Ray, that meets a fault at every call that changes the disk: `python -m tests.data.disk_faults`.

This process only forks: storage's threads don't survive it, so whatever touches a run is done by children.
"""

import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ddm_ray.config import load_recipe
from ddm_ray.data.partition.stage import partition
from ddm_ray.data.prepare import decoder_process
from ddm_ray.data.prepare.stage import prepare
from ddm_ray.data.sharded.serial import serial
from ddm_ray.errors import DDMError
from ddm_ray.run.graph import PARTITION, ROWS
from ddm_ray.run.run import Run
from tests.traced import DiskFault, Outcome, traced

REFUSED = 3
DECODERS: list[Any] = []
"""Begun before anything is traced: none of a traced process could start, as its calls stop, too."""
SETTINGS = ("data.source=shapes:90", "data.channels=3", "data.image_size=8", "data.num_classes=12", "embedder.dim=4")


def make_rows(folder: Path) -> None:
    decoder_process._idle[:] = DECODERS
    prepare(Run.create(str(folder), load_recipe("tiny", SETTINGS)), chunk_rows=40, execute=serial)


def begin_decoder() -> None:
    """Start the process that all that are forked have, one at a time."""
    decoder_process.decode_apart([b""], [np.empty((1, 1, 3), np.uint8)])
    DECODERS.extend(decoder_process._idle)


def make_partition(folder: Path) -> None:
    partition(Run.open(str(folder)), with_report=False)


STAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "prepare": (make_rows, ROWS),
    "partition": (make_partition, PARTITION),
}


def exit_on_refusal(work: Callable[[Path], None], folder: Path) -> None:
    """A refusal that a user is told in one line ends the process in a way of its own."""
    try:
        work(folder)
    except DDMError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(REFUSED)


def read_whole(folder: Path, artifact: str) -> None:
    """What a reader sees: nothing finished, or an artifact of which every byte is verified."""
    if not (folder / "run.json").exists():
        return
    run = Run.open(str(folder))
    if manifest := run.finished(artifact):
        for name in manifest.files:
            run.read(artifact, name, manifest)


def contents(folder: Path, artifact: str) -> dict[str, bytes]:
    """Files of an artifact, but for what an interrupted write left, which no reader lists."""
    files = (file for file in (folder / artifact).rglob("*") if file.is_file() and "#" not in file.name)
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def main(stage: str, root: Path, fault: DiskFault, stride: int) -> None:
    """Fault the first, every `stride`-th and the last call: what a reader sees, then the same command, the same result.

    Prints the number of calls, that of the states they left, and the kinds of calls.
    """
    begin_decoder()
    work, artifact = STAGES[stage]
    base = root / "base"
    if stage == "partition":
        require(traced(partial(make_rows, base), str(root)))
    undisturbed = root / "whole"
    if base.exists():
        shutil.copytree(base, undisturbed)
    points = require(traced(partial(work, undisturbed), str(root))).calls
    expected = contents(undisturbed, artifact)
    seen: list[dict[str, bytes]] = []
    for at in sorted({*range(1, len(points) + 1, stride), len(points)}):
        folder = root / f"at-{at}"
        if base.exists():
            shutil.copytree(base, folder)
        met = traced(partial(exit_on_refusal, work, folder), str(root), fault, at)
        if met.status not in ({-9} if fault is DiskFault.KILL else {0, REFUSED}):
            raise SystemExit(f"{stage}, call {at} ({points[at - 1]}): ended with {met.status}")
        require(traced(partial(read_whole, folder, artifact), str(root)))
        if met.status == 0 and contents(folder, artifact) != expected:
            raise SystemExit(f"{stage}, call {at} ({points[at - 1]}): ended well with other results")
        left = contents(folder, "")
        if left not in seen:  # of calls that leave the same to be seen, one is gone on from
            seen.append(left)
            require(traced(partial(work, folder), str(root)))
            resumed = contents(folder, artifact)
            if resumed != expected:
                differing = sorted(name for name in resumed | expected if resumed.get(name) != expected.get(name))
                raise SystemExit(f"{stage}, call {at} ({points[at - 1]}): other results in {differing}")
        shutil.rmtree(folder)
    print(len(points), len(seen), *sorted(set(points)))


def require(outcome: Outcome) -> Outcome:
    if outcome.status:
        raise SystemExit(f"a stage that should end well ended with {outcome.status}")
    return outcome


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main(sys.argv[1], Path(sys.argv[2]), DiskFault[sys.argv[3]], int(sys.argv[4]))
