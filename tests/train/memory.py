"""Trains with so little memory left that a whole batch doesn't fit, as launches do: again as long as it isn't final.

`python tests/train/memory.py RUN MEBIBYTES` prints the micro-batch of each attempt; all but the last ran out of memory.
"""

import json
import os
import resource
import sys
from contextlib import suppress
from pathlib import Path

from ddm_ray.run.graph import Artifact

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch.multiprocessing as mp

from ddm_ray.errors import OutOfMemory
from ddm_ray.memory import taken_bytes
from ddm_ray.placement import TrainPlacement
from ddm_ray.train import local, worker
from tests.train import preloaded  # noqa: F401

EXPERT = Artifact("experts/001")


def attempt_main(rank: int, url: str, mebibytes: int) -> None:
    most = taken_bytes("VmData") + mebibytes * 2**20
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    with local.world(), suppress(OutOfMemory):
        worker.train(url, EXPERT, TrainPlacement(resources_per_worker={"CPU": os.cpu_count()}))


def main(url: str, mebibytes: int) -> None:
    final = False
    while not final:
        mp.start_processes(attempt_main, args=(url, mebibytes), nprocs=1, start_method="fork")
        # Read by Python itself: the store's threads wouldn't survive the next fork.
        attempt = max((Path(url) / EXPERT / "attempts").iterdir())
        failed = (attempt / "FAILED").exists()
        note = json.loads((attempt / ("FAILED" if failed else "HEARTBEAT")).read_text())
        print(note["micro_batch"], flush=True)
        final = note.get("final", True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
