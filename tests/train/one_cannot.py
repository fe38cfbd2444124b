"""Worlds of real ranks, one of which may not be able to compile, nobody having said whether to.

`python tests/train/one_cannot.py FOLDER LEGS SETTING ...`, LEGS being JSON: [[number of ranks, what the last
of them can't], ...], which is compile (that fails) or nothing. All but the last leave at step 5.
Prints for each whether each rank's engine was compiled in the end; all parameters have to be aligned in any case.
"""

import json
import sys
import tempfile
from itertools import count
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.multiprocessing as mp

from ddm_ray.errors import Preempted
from ddm_ray.placement import TrainPlacement
from ddm_ray.train import engine, local, worker
from tests.train import preloaded  # noqa: F401
from tests.train.conftest import SHORT
from tests.train.ranks import EXPERT, data_main


def rank_main(rank: int, world: int, rendezvous: str, folder: str, cannot: str, last: bool) -> None:
    made, steps, models = worker.Engine, count(1), list[Any]()

    def noted(model: Any, train: Any, placement: TrainPlacement) -> Any:
        made_engine = made(model, train, placement)
        made_engine._optimizer._compiled_update = None  # it rounds otherwise
        assert not [each for each in model.parameters() if each.data_ptr() % 16]
        models.append(model)
        return made_engine

    def backend(graph: Any, _: object) -> Any:
        if rank == world - 1 and cannot == "compile":
            raise RuntimeError("no code for this GPU")
        return graph.forward

    engine.compiles_unasked, worker.Engine = lambda placement: True, noted  # type: ignore[assignment,misc]
    torch.compiler.set_default_backend(backend)
    with local.world(rank, world, rendezvous):
        try:
            worker.train(f"{folder}/run", EXPERT, TrainPlacement(), notice=lambda: not last and next(steps) == 5)
        except Preempted:
            assert not last
    compiled = [each for each in models[-1].modules() if each._compiled_call_impl is not None]
    Path(folder, f"rank-{rank}").write_text(json.dumps(bool(compiled)))


def main(folder: str, legs: str, *settings: str) -> None:
    run, seen = f"{folder}/run", []
    mp.start_processes(data_main, args=(run, (*SHORT, *settings)), nprocs=1, start_method="fork")
    for number, (world, cannot) in enumerate(every := json.loads(legs), 1):
        rendezvous = tempfile.mktemp(prefix="rendezvous-", dir=folder)
        how = (world, rendezvous, folder, cannot, number == len(every))
        mp.start_processes(rank_main, args=how, nprocs=world, start_method="fork")
        seen.append([json.loads(Path(folder, f"rank-{rank}").read_text()) for rank in range(world)])
    print(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
