"""Compiled code: where it is kept, and the try by which a training on a GPU goes without what can't be compiled."""

import gc
import os
import socket
import sys
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from ddm_ray.data.scratch import own_folder
from ddm_ray.errors import StorageError
from ddm_ray.spelling import one_line
from ddm_ray.train.batches import RankBatches
from ddm_ray.train.engine import Engine
from ddm_ray.train.failures import is_out_of_memory
from ddm_ray.train.job import TrainJob
from ddm_ray.train.ranks import gather_objects


def keep_code(cache: str | None) -> None:
    """Have this process keep compiled code below `cache`, for the next one; none, or not to be written: as torch does.

    Code is run as it lies there, so that the folder is this user's alone.
    """
    if cache:
        with suppress(StorageError, OSError):
            folder = Path(cache).absolute() / "compiled"
            folder.parent.mkdir(parents=True, exist_ok=True)
            own_folder(folder)
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))


def try_code(engine: Engine, job: TrainJob, batches: RankBatches, step: int) -> str:
    """Compile for a step without taking it; where one rank can't, none trains compiled, and this says why, else "".

    All ranks must ask. Raises for too little memory, which says nothing of compilers, and for a lost GPU.
    """
    torch.compiler.reset()  # a job before this one leaves less room: torch compiles for so many shapes, and for no more
    problem = ""
    ((batch, _),) = batches.at(step, engine.device, most=1)
    try:
        engine.make_code(job.objective, batch)
    except Exception as error:  # whatever a compiler raises
        if is_out_of_memory(error) or isinstance(error, torch.AcceleratorError):
            raise
        text = one_line(str(error).strip().split("\n\n")[0], 300)  # the rest is torch's advice
        problem = f"{text or type(error).__name__} (rank {dist.get_rank()} on {socket.gethostname()})"
    first = next(filter(None, gather_objects(problem)), "")
    if first:
        engine.go_uncompiled()
        gc.collect()  # what the compiler holds of the batch
        if dist.get_rank() == 0:
            text = f"warning: {job.artifact}: trains uncompiled, which is slower: {first}"
            print(f"{text}; `compile: false` in the islands' file leaves the try out", file=sys.stderr)
    return first
