"""Trains the same short expert on several worlds of real ranks; forked after the imports, so that they are cheap."""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch.distributed as dist
import torch.multiprocessing as mp

from ddm_ray.placement import Placement
from ddm_ray.train import worker
from ddm_ray.train.attempt import TrainAttempt
from tests.random_run import make_data
from tests.train.conftest import SHORT

EXPERT = "experts/001"


def rank_main(rank: int, world: int, folder: str, url: str, settings: dict[str, int], stop: int | None) -> None:
    """One rank; with `stop`, all ranks leave the job once that step is saved."""
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group("gloo", init_method=f"file://{folder}", rank=rank, world_size=world)
    if stop is not None:
        save = TrainAttempt.save

        def save_and_leave(self: TrainAttempt, done: int, *rest: object) -> None:
            save(self, done, *rest)  # type: ignore[arg-type]
            if done == stop:
                dist.barrier()
                raise SystemExit(0)

        TrainAttempt.save = save_and_leave  # type: ignore[method-assign, assignment]
    worker.train(url, EXPERT, Placement.model_validate(settings))
    dist.destroy_process_group()


def data_main(rank: int, url: str, settings: tuple[str, ...]) -> None:
    """Make a run's data in a process of its own: pyarrow's threads don't survive a fork."""
    make_data(url, settings=settings)


def run_world(root: Path, url: str, world: int, stop: int | None = None, **settings: int) -> None:
    """Fork `world` ranks and wait for them; raises if one fails."""
    rendezvous = root / f"rendezvous-{Path(url).name}-{world}"
    arguments = (world, str(rendezvous), url, settings, stop)
    mp.start_processes(rank_main, args=arguments, nprocs=world, start_method="fork")


def main(root: Path) -> None:
    """Prints the names of the runs as JSON on the last line."""
    cases = {
        "world1-zero1": [dict(world=1)],
        "world2-zero1": [dict(world=2)],
        "world3-zero2": [dict(world=3, zero_stage=2, micro_batch=1)],
        "world2-then-1": [dict(world=2, stop=8, checkpoint_steps=4), dict(world=1)],
        "world2-bf16": [dict(world=2)],
    }
    for name, legs in cases.items():
        extra = ("expert.train.precision=bf16",) if "bf16" in name else ()
        url = str(root / name)
        mp.start_processes(data_main, args=(url, (*SHORT, *extra)), nprocs=1, start_method="fork")
        for leg in legs:
            run_world(root, url, **leg)  # type: ignore[arg-type]
    print(json.dumps(list(cases)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
