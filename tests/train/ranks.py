"""Trains short experts on worlds of real ranks over gloo; forked after the imports, so that they are cheap.

`python tests/train/ranks.py FOLDER CASES` with CASES a JSON object: name -> {"settings": [...], "legs": [...]}; a leg
has "world", TrainPlacement's fields, and "stop": the step at which a rank is told that its machine is about to go. A
case with "artifact" trains that, of a run whose experts are there.
"""

import json
import sys
import tempfile
from itertools import count
from pathlib import Path
from typing import Any

from ddm_ray.run.graph import Artifact

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch.multiprocessing as mp

from ddm_ray.errors import Preempted
from ddm_ray.placement import TrainPlacement
from ddm_ray.train import local, worker
from tests.random_run import make_data, make_run
from tests.train import preloaded  # noqa: F401

EXPERT = Artifact("experts/001")


def rank_main(rank: int, world: int, rendezvous: str, url: str, settings: dict[str, Any], stop: int | None) -> None:
    """One rank; with `stop`, the last one has notice at that step."""
    steps, artifact = count(settings.pop("first", 0) + 1), Artifact(settings.pop("artifact", EXPERT))
    placement = TrainPlacement.model_validate(settings)
    with local.world(rank, world, rendezvous):
        try:
            worker.train(url, artifact, placement, notice=lambda: next(steps) == stop and rank == world - 1)
            assert stop is None
        except Preempted:
            assert stop is not None


def data_main(rank: int, url: str, settings: tuple[str, ...], experts: bool = False) -> None:
    """Make a run's data in a process of its own: pyarrow's threads don't survive a fork."""
    if experts:
        make_run(url, settings=settings, num_rows=120)
    else:
        make_data(url, settings=settings)


def run_world(url: str, world: int, stop: int | None = None, **settings: Any) -> None:
    """Fork `world` ranks and wait for them; raises if one fails."""
    rendezvous = tempfile.mktemp(prefix="rendezvous-", dir=Path(url).parent)
    mp.start_processes(rank_main, args=(world, rendezvous, url, settings, stop), nprocs=world, start_method="fork")


def main(folder: str, cases: dict[str, Any]) -> None:
    for name, case in cases.items():
        url = str(Path(folder) / name)
        mp.start_processes(data_main, args=(url, case["settings"], "artifact" in case), nprocs=1, start_method="fork")
        done = 0
        for leg in case["legs"]:
            run_world(url, first=done, artifact=case.get("artifact", EXPERT), **leg)
            done = leg.get("stop", 0)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
