"""Compilation that nobody has asked for: a training on a GPU tries it on two blocks, and goes without if it fails."""

import gc
import math
import os
import socket
import sys
from contextlib import suppress
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddm_ray.data.scratch import own_folder
from ddm_ray.errors import ConfigError, StorageError
from ddm_ray.models import weights
from ddm_ray.models.compiled import compile_blocks, lacking_compiler, leave_two_of_each
from ddm_ray.models.dit import checkpoint_activations
from ddm_ray.models.flops import num_parameters
from ddm_ray.models.rows import rows_of_zeros
from ddm_ray.placement import TrainPlacement
from ddm_ray.spelling import one_line
from ddm_ray.train.attempt import TrainAttempt, out_of_memory
from ddm_ray.train.engine import optimizer_of, own_device
from ddm_ray.train.heldout import Schedule
from ddm_ray.train.job import TrainJob
from ddm_ray.train.watchdog import Watchdog

OF_CODE = ("misaligned address", "illegal memory access", "illegal instruction")
"""Words of a GPU's errors that the next try of the same code would meet again."""


def to_be_tried(placement: TrainPlacement) -> bool:
    """True on a GPU where nobody has said whether to compile; all ranks of a training find the same."""
    return placement.compile is None and placement.zero_stage < 3 and own_device().type == "cuda"


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


def uncompiled(job: TrainJob, placement: TrainPlacement, attempt: TrainAttempt, watchdog: Watchdog) -> str:
    """Why the attempt's steps are better left as they are, by the first rank that can't compile them; "": all can.

    All ranks must ask. Raises as `why_not`.
    """
    attempt.phase("compiling")
    torch.compiler.reset()  # a job before this one leaves less room: torch compiles for so many shapes, and for no more
    with watchdog.step():
        problem = why_not(job, placement, attempt.micro_batch, dist.get_world_size())
    watchdog.forget()
    world, rank = dist.get_world_size(), dist.get_rank()
    problems = [""] * world
    dist.all_gather_object(problems, problem and f"{problem} (rank {rank} on {socket.gethostname()})")
    attempt.phase("starting")
    first = next(filter(None, problems), "")
    if first and rank == 0:
        text = f"warning: {job.artifact}: trains uncompiled, which is slower: {first}"
        print(f"{text}; `compile: false` in the islands' file leaves the try out", file=sys.stderr)
    return first


def why_not(job: TrainJob, placement: TrainPlacement, rows: int, workers: int) -> str:
    """Why steps of so many rows at once can't be compiled, in a line; "" once two blocks and an update of theirs are.

    They run forward and backward in each way that the steps of one of so many workers go, and without gradients as
    held-out rows do. What is compiled here the job's own network finds compiled, all but the update. Too little memory
    is no reason: others may still hold some, and the steps themselves tell. Raises ConfigError for an error of the code
    that ends the GPU's use, and torch.AcceleratorError for others of the GPU.
    """
    if lacking := lacking_compiler():
        return f"there is no {lacking}"
    if own_device().type == "cuda" and find_spec("triton") is None:
        return "there is no triton"
    try:
        # Else torch would go on uncompiled, and not say so.
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            _run(job, placement, rows, workers)
        _await_gpu()
    except Exception as error:  # whatever a compiler raises
        if out_of_memory(error):
            return ""
        _require_living_gpu(error)
        return one_line(str(error).strip().split("\n\n")[0], 300) or type(error).__name__  # the rest is torch's advice
    finally:
        gc.collect()
        if torch.cuda.is_available():
            with suppress(torch.AcceleratorError):
                torch.cuda.empty_cache()  # it would be split among what stays
    return ""


def _await_gpu() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _require_living_gpu(error: Exception) -> None:
    """Raise where an error has ended the GPU's use for this process: for good if it is of what code does."""
    try:
        _await_gpu()
    except torch.AcceleratorError as dead:
        error = dead if not isinstance(error, torch.AcceleratorError) else error
    if isinstance(error, torch.AcceleratorError):
        if any(words in str(error) for words in OF_CODE):
            fix = "set compile to false in the islands' file"
            raise ConfigError(f"compiling two blocks: {one_line(error, 300)}", fix) from None
        raise error


def _run(job: TrainJob, placement: TrainPlacement, rows: int, workers: int) -> None:
    device, train = own_device(), job.train
    share = math.ceil(job.batch / workers)
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

    def inputs(rows: int, kept: int | None = None) -> Any:
        with device:
            return rows_of_zeros(model, rows, job.image_shape, job.text_tokens, kept)

    # The last of a step's micro-batches has what is left.
    for each, masking in product({rows, share % rows} - {0}, {job.masking(0), job.masking(train.steps - 1)}):
        model(*inputs(each, None if masking is None else masking.num_kept)).float().sum().backward()
    if schedule := Schedule.of(job, placement):
        with torch.no_grad():
            model.eval()(*inputs(schedule.rows_at_once(rows, workers)))
    if placement.zero_stage > 0:
        shard = nn.Parameter(torch.zeros(num_parameters(model), device=device))
        shard.grad = torch.zeros_like(shard)
        optimizer_of(train, [shard], placement.zero_stage, compiled=True, alone=True).step()
