"""Trains with so little memory left that a whole batch doesn't fit, as launches do: again as long as it isn't final.

`python tests/train/memory.py RUN MEBIBYTES` prints the micro-batch of each attempt that ran out of memory, and 0 for
the one that didn't.
"""

import json
import os
import resource
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch.distributed as dist
import torch.multiprocessing as mp

from ddm_ray.errors import TooManyRows
from ddm_ray.placement import Placement
from ddm_ray.train import worker

EXPERT = "experts/001"


def attempt_main(rank: int, url: str, mebibytes: int) -> None:
    os.environ["LOCAL_RANK"] = "0"
    dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + mebibytes * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    with suppress(TooManyRows):
        worker.train(url, EXPERT, Placement())


def main(url: str, mebibytes: int) -> None:
    final = False
    while not final:
        mp.start_processes(attempt_main, args=(url, mebibytes), nprocs=1, start_method="fork")
        # Read by Python itself: the store's threads wouldn't survive the next fork.
        failure = max((Path(url) / EXPERT / "attempts").iterdir()) / "FAILED"
        note = json.loads(failure.read_text()) if failure.exists() else {"micro_batch": 0, "final": True}
        print(note["micro_batch"], flush=True)
        final = note["final"]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
