"""Two real ranks of which the second can't compile, nobody having said: `python tests/train/one_cannot.py FOLDER`.

Prints for each rank whether its engine was to compile.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.multiprocessing as mp

from ddm_ray.placement import TrainPlacement
from ddm_ray.train import local, worker
from tests.train import preloaded  # noqa: F401
from tests.train.conftest import SHORT
from tests.train.ranks import EXPERT, data_main


def rank_main(rank: int, world: int, rendezvous: str, folder: str) -> None:
    made = worker.Engine

    def noted(model: Any, train: Any, placement: TrainPlacement) -> Any:
        Path(folder, f"rank-{rank}").write_text(json.dumps(placement.compile))
        return made(model, train, placement)

    def backend(graph: Any, _: object) -> Any:
        if rank:
            raise RuntimeError("no code for this GPU")
        return graph.forward

    worker.to_be_tried, worker.Engine = lambda placement: True, noted  # type: ignore[assignment,misc]
    torch.compiler.set_default_backend(backend)
    with local.world(rank, world, rendezvous):
        worker.train(f"{folder}/run", EXPERT, TrainPlacement())


def main(folder: str) -> None:
    mp.start_processes(data_main, args=(f"{folder}/run", SHORT), nprocs=1, start_method="fork")
    rendezvous = tempfile.mktemp(prefix="rendezvous-", dir=folder)
    mp.start_processes(rank_main, args=(2, rendezvous, folder), nprocs=2, start_method="fork")
    print(json.dumps([json.loads(Path(folder, f"rank-{rank}").read_text()) for rank in range(2)]))


if __name__ == "__main__":
    main(sys.argv[1])
