"""Records the collectives of a training: `python -m tests.train.collectives FOLDER WORLD`.

WORLD ranks over gloo train an expert, leave at step 3, and go on to the end, with states, a milestone and measurements
of the held-out loss. Prints, for each leg and rank, the calls of torch.distributed in their order.
"""

import functools
import json
import sys
import tempfile
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ddm_ray.errors import Preempted
from ddm_ray.placement import TrainPlacement
from ddm_ray.train import local, worker
from tests.train import preloaded  # noqa: F401
from tests.train.ranks import EXPERT, data_main

STEPS = ("expert.train.steps=9", "expert.train.batch=12")
# States of steps 3 (where it leaves), 6, 7 and 9; no clock says when. Measured at 8 and 9; a milestone at 7.
PLACEMENT = TrainPlacement(
    checkpoint_minutes=0, checkpoint_steps=6, milestone_steps=7, heldout_rows=16, hang_seconds=60
)
STOP = 3
RECORDED = ("all_reduce", "all_gather_object", "broadcast_object_list", "barrier")


def record(name: str, calls: list[str]) -> Callable[..., Any]:
    """The collective of that name, which notes each of the package's own calls, and where DeepSpeed calls others."""
    original = getattr(dist, name)

    @functools.wraps(original)
    def recorded(*arguments: Any, **keywords: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.startswith("ddm_ray."):
            size = f" {arguments[0].numel()}" if arguments and isinstance(arguments[0], torch.Tensor) else ""
            calls.append(f"{name}{size}")
        return original(*arguments, **keywords)

    return recorded


def rank_main(rank: int, world: int, rendezvous: str, url: str, stop: int | None, output: str) -> None:
    calls, steps = list[str](), count(1)
    for name in RECORDED:
        setattr(dist, name, record(name, calls))
    original = worker.Engine.step

    def step(*arguments: Any) -> Any:
        calls.append("step")
        return original(*arguments)

    worker.Engine.step = step  # type: ignore[method-assign]
    with local.world(rank, world, rendezvous):
        try:
            worker.train(url, EXPERT, PLACEMENT, notice=lambda: next(steps) == stop and rank == world - 1)
        except Preempted:
            assert stop is not None
    Path(output).write_text(json.dumps(calls))


def main(folder: str, world: int) -> None:
    url = f"{folder}/run"
    mp.start_processes(data_main, args=(url, STEPS), nprocs=1, start_method="fork")
    legs = []
    for leg, stop in enumerate((STOP, None)):
        rendezvous = tempfile.mktemp(prefix="rendezvous-", dir=folder)
        ranks = [
            mp.get_context("fork").Process(
                target=rank_main, args=(rank, world, rendezvous, url, stop, f"{folder}/{leg}-{rank}")
            )
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
            assert process.exitcode == 0
        legs.append([json.loads(Path(folder, f"{leg}-{rank}").read_text()) for rank in range(world)])
    print(json.dumps(legs))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
