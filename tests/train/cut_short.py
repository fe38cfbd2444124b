"""Training that meets a fault at a write: `python -m tests.train.cut_short FOLDER FAULT COUNT`.

A world of one with real DeepSpeed meets the fault at COUNT calls, evenly spread over all that change what is below
`experts/`: states, heartbeats, curves, weights, the manifest. Then it goes on, and must end with the same bits.

This process only forks: storage's threads don't survive it, so whatever touches a run is done by children.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ddm_ray.errors import CorruptArtifact, StorageError
from ddm_ray.jobs.attempts import saved_states
from ddm_ray.placement import TrainPlacement
from ddm_ray.run.run import Run
from ddm_ray.train import local
from tests.random_run import make_data
from tests.traced import DiskFault, Outcome, traced
from tests.train.ranks import EXPERT

REFUSED = 3
SHORT = ("expert.train.steps=12", "expert.train.batch=6")
PLACEMENT = TrainPlacement(checkpoint_steps=3, milestone_steps=6)


def train(folder: Path) -> None:
    """A refusal of storage ends the process in a way of its own."""
    try:
        local.train_locally(str(folder), [EXPERT], PLACEMENT)
    except StorageError as error:
        print(f"StorageError: {error}", file=sys.stderr, flush=True)
        os._exit(REFUSED)


def read_whole(folder: Path) -> None:
    """What a reader finds: every committed state and artifact is whole, byte by byte."""
    run = Run.open(str(folder))
    for state in saved_states(run.store, EXPERT):
        if isinstance(state, CorruptArtifact):
            raise state
        for name in state.manifest.files:
            run.read(state.prefix, name, state.manifest)
    if manifest := run.finished(EXPERT):
        for name in manifest.files:
            run.read(EXPERT, name, manifest)


def result(folder: Path) -> dict[str, bytes]:
    """The curve and the weights of a finished job, by name."""
    info = json.loads((folder / EXPERT / "_MANIFEST.json").read_bytes())["info"]
    weights = folder / EXPERT / info["weights"]
    return {name: (weights / name).read_bytes() for name in ("curve.safetensors", "ema.safetensors", "model.json")}


def child(work: Callable[[], object]) -> None:
    """Do it in a forked process, undisturbed."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    if os.waitpid(pid, 0)[1]:
        raise SystemExit("what should have ended well didn't")


def main(root: Path, fault: DiskFault, count: int) -> None:
    """Prints the number of calls, and how those that met the fault ended."""
    base, undisturbed = root / "base", root / "whole"
    child(lambda: make_data(str(base), settings=SHORT))
    shutil.copytree(base, undisturbed)
    quiet: Outcome = traced(partial(train, undisturbed), f"{undisturbed}/experts")
    expected, ends = result(undisturbed), []
    for at in sorted({1 + number * len(quiet.calls) // count for number in range(count)}):
        folder = root / f"at-{at}"
        shutil.copytree(base, folder)
        met = traced(partial(train, folder), f"{folder}/experts", fault, at)
        ends.append(met.status)
        where = f"{fault.name} at call {at} ({met.calls[at - 1 :][:1]})"
        print(where, "ended with", met.status, file=sys.stderr, flush=True)
        if met.status not in ({-9, 0} if fault is DiskFault.KILL else {0, REFUSED}):
            raise SystemExit(f"{where}: ended with {met.status}")
        child(partial(read_whole, folder))
        if met.status == 0 and result(folder) != expected:
            raise SystemExit(f"{where}: ended well with other results")
        child(partial(train, folder))
        if result(folder) != expected:
            raise SystemExit(f"{where}: other results")
        shutil.rmtree(folder)
    print(len(quiet.calls), *ends)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main(Path(sys.argv[1]), DiskFault[sys.argv[2]], int(sys.argv[3]))
