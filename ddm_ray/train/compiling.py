"""Compilation that nobody has asked for: a training on a GPU tries it on two blocks, and goes without if it fails."""

import gc
import os
import sys
from contextlib import suppress
from importlib.util import find_spec
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
        problem = why_not(job, placement, attempt.micro_batch)
    watchdog.forget()
    problems = [""] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    attempt.phase("starting")
    first = next(filter(None, problems), "")
    if first and dist.get_rank() == 0:
        text = f"warning: {job.artifact}: trains uncompiled, which is slower: {first}"
        print(f"{text}. `compile: false` in the islands' file leaves the try out", file=sys.stderr)
    return first


def why_not(job: TrainJob, placement: TrainPlacement, rows: int) -> str:
    """Why steps of so many rows can't be compiled, in a line; "" once two blocks and an update of theirs have been.

    They run forward and backward in each way that the job's steps go, and without gradients as held-out rows do. What
    is compiled here the job's own network finds compiled, all but the update. Too little memory is no reason: others
    may still hold some, and the steps themselves tell. Raises ConfigError for an error of the GPU, which ends its use.
    """
    if lacking := lacking_compiler():
        return f"there is no {lacking} here; install g++"
    if own_device().type == "cuda" and find_spec("triton") is None:
        return "there is no triton here"
    try:
        # Else torch would go on uncompiled, and not say so.
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            _run(job, placement, rows)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except torch.AcceleratorError as error:
        fix = "set compile to false in the islands' file"
        raise ConfigError(f"compiling two blocks: {one_line(error, 300)}", fix) from None
    except Exception as error:  # whatever a compiler raises
        if out_of_memory(error):
            return ""
        return one_line(str(error).strip().split("\n\n")[0], 300) or type(error).__name__  # the rest is torch's advice
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # it would be split among what stays
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

    def inputs(rows: int, kept: int | None = None) -> Any:
        with device:
            return rows_of_zeros(model, rows, job.image_shape, job.text_tokens, kept)

    for masking in {job.masking(0), job.masking(train.steps - 1)}:
        model(*inputs(rows, None if masking is None else masking.num_kept)).float().sum().backward()
    if schedule := Schedule.of(job, placement):
        with torch.no_grad():
            model.eval()(*inputs(schedule.rows_at_once(rows, dist.get_world_size())))
    if placement.zero_stage > 0:
        shard = nn.Parameter(torch.zeros(num_parameters(model), device=device))
        shard.grad = torch.zeros_like(shard)
        optimizer_of(train, [shard], placement.zero_stage, compiled=True, alone=True).step()
