"""Compiled code: the folder that keeps it, and the first compilation on a GPU, without which training goes on."""

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
    """Make this process keep compiled code below `cache`, for the next process.

    Without a cache, or if it can't be written, torch chooses the folder. Code in it is run unchecked, so that the
    folder has to be this user's own.
    """
    if cache:
        with suppress(StorageError, OSError):
            folder = Path(cache).absolute() / "compiled"
            folder.parent.mkdir(parents=True, exist_ok=True)
            own_folder(folder)
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))


def try_code(engine: Engine, job: TrainJob, batches: RankBatches, step: int) -> str:
    """Compile for a step without taking it; if one rank can't, no rank trains compiled. The reason, or "".

    All ranks must call it. Raises for too little memory, which says nothing of compilers, and for a lost GPU.
    """
    torch.compiler.reset()  # torch compiles a limited number of shapes, and a job before this one has used some
    problem = ""
    ((batch, _),) = batches.at(step, engine.device, most=1)
    try:
        engine.make_code(job.objective, batch)
    except Exception as error:  # compilers raise any class
        if is_out_of_memory(error) or isinstance(error, torch.AcceleratorError):
            raise
        text = one_line(str(error).strip().split("\n\n")[0], 300)  # the rest is torch's advice
        problem = f"{text or type(error).__name__} (rank {dist.get_rank()} on {socket.gethostname()})"
    first = next(filter(None, gather_objects(problem)), "")
    if first:
        engine.go_uncompiled()
        gc.collect()  # the compiler may hold the batch
        if dist.get_rank() == 0:
            text = f"warning: {job.artifact}: trains uncompiled, which is slower: {first}"
            print(f"{text}; `compile: false` in the islands' file leaves the try out", file=sys.stderr)
    return first
