"""Compilation that nobody has asked for: a training on a GPU tries it on two blocks, and goes without if it fails."""

import gc
import os
import sys
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from ddm_ray.data.scratch import own_folder
from ddm_ray.errors import StorageError
from ddm_ray.models import weights
from ddm_ray.models.compiled import can_make_code, compile_blocks, leave_two_of_each
from ddm_ray.models.dit import checkpoint_activations
from ddm_ray.models.flops import num_parameters
from ddm_ray.models.rows import rows_of_zeros
from ddm_ray.placement import TrainPlacement
from ddm_ray.spelling import one_line
from ddm_ray.train.attempt import TrainAttempt, out_of_memory
from ddm_ray.train.engine import optimizer_of, own_device
from ddm_ray.train.job import TrainJob
from ddm_ray.train.watchdog import Watchdog


def to_be_tried(placement: TrainPlacement) -> bool:
    """True where nobody has said whether to compile, and this process's device has all that it takes."""
    return placement.compile is None and placement.zero_stage < 3 and can_make_code(own_device())


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


def compiles(job: TrainJob, placement: TrainPlacement, attempt: TrainAttempt, watchdog: Watchdog) -> bool:
    """True if all ranks can compile their steps of the attempt's micro-batch; else why not is said once.

    All ranks must ask. Raises OutOfMemory.
    """
    attempt.phase("compiling")
    with watchdog.step(), attempt.catch_oom("compiling two blocks, "):
        problem = why_not(job, placement, attempt.micro_batch)
    watchdog.forget()
    problems = [""] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    attempt.phase("starting")
    if (first := next(filter(None, problems), None)) and dist.get_rank() == 0:
        text = f"warning: {job.artifact}: trains uncompiled, which is slower: {first}"
        print(f"{text}. `compile: false` in the islands' file leaves the try out", file=sys.stderr)
    return not any(problems)


def why_not(job: TrainJob, placement: TrainPlacement, rows: int) -> str:
    """Why steps of so many rows can't be compiled, in a line; "" once two blocks and an update of theirs have been.

    They run forward and backward in each way that the job's steps go, and without gradients. What is compiled here the
    job's own network finds compiled, all but the update. Raises what says that memory is too small.
    """
    try:
        _run(job, placement, rows)
    except Exception as error:  # whatever a compiler raises
        if out_of_memory(error):
            raise
        return one_line(str(error).strip().split("\n\n")[0], 300) or type(error).__name__  # the rest is torch's advice
    finally:
        gc.collect()
    return ""


def _run(job: TrainJob, placement: TrainPlacement, rows: int) -> None:
    device, train = own_device(), job.train
    model = weights.build(job.spec, "meta")
    leave_two_of_each(model)
    model.to_empty(device=device)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.detach().zero_()
    if train.precision == "bf16":
        model.bfloat16()
    if placement.activation_checkpointing:
        checkpoint_activations(model)
    compile_blocks(model)
    for masking in {job.masking(0), job.masking(train.steps - 1)}:
        kept = None if masking is None else masking.num_kept
        with device:
            inputs = rows_of_zeros(model, rows, job.image_shape, job.text_tokens, kept)
        model.train()
        model(*inputs).float().sum().backward()
        with torch.no_grad():
            model.eval()(*inputs)
    if placement.zero_stage > 0:
        shard = nn.Parameter(torch.zeros(num_parameters(model), device=device))
        shard.grad = torch.zeros_like(shard)
        optimizer_of(train, [shard], placement.zero_stage, compiled=True, alone=True).step()
