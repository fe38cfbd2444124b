"""Errors that end an attempt: which mean too little memory or a lost worker, and the note that an attempt leaves."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ddm_ray.errors import ConfigError, DDMError, OutOfMemory, Superseded
from ddm_ray.jobs.attempts import OUT_OF_MEMORY
from ddm_ray.placement import TrainPlacement
from ddm_ray.spelling import one_line

NO_MEMORY = (
    "can't allocate memory",
    "can't start new thread",  # Python's, where threads are limited, or memory for their stacks
    *(f"{source}: out of memory" for source in ("CUDA error", "CUDA driver error", "[CUDA]")),
)
"""Words of errors that have no class of their own."""


def is_out_of_memory(error: BaseException) -> bool:
    """True if an allocation failed: torch's own error on a GPU, a RuntimeError of a CPU's allocator, or of a driver.

    So does one of a thread or a process. A compiler that ran out of memory wraps the error; it counts too.
    """
    error = getattr(error, "inner_exception", error)
    if isinstance(error, OSError):
        return error.errno in (errno.ENOMEM, errno.EAGAIN) and error.filename is None
    by_words = isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)
    return by_words or isinstance(error, torch.OutOfMemoryError | MemoryError)


def is_lost_worker(error: BaseException) -> bool:
    """True if a connection to another rank ended: NCCL's own error, or a RuntimeError of gloo."""
    of_gloo = isinstance(error, RuntimeError) and "gloo/" in str(error)
    return of_gloo or isinstance(error, dist.DistBackendError | dist.DistNetworkError)


@contextmanager
def blame_micro_batch(micro_batch: int) -> Iterator[None]:
    """Turn running out of memory into OutOfMemory, which names the micro-batch."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise OutOfMemory(f"micro_batch {micro_batch}: {one_line(error, 400, tail=True)}") from None
        raise


@contextmanager
def blame_state(artifact: str, placement: TrainPlacement) -> Iterator[None]:
    """Turn running out of memory, while an engine is made, into a ConfigError.

    The error passes: an attempt before this one may still hold some memory.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        full = ConfigError(
            f"{artifact}: a worker's memory is too small for its weights and optimizer, by ZeRO stage"
            f" {placement.zero_stage} on {placement.workers.max} ({one_line(error, 200)}); give it more workers, or a"
            " higher zero_stage"
        )
        full.passes = True
        raise full from None


def failure_note(error: BaseException, micro_batch: int, elastic: bool) -> dict[str, Any]:
    """Fields of the note of an attempt that ends by `error`; `final`: the launch must not try again.

    `elastic`: a next attempt may have more workers.
    """
    text = one_line(error.message if isinstance(error, DDMError) else error, 500, tail=True)
    if isinstance(error, OutOfMemory):
        # The next attempt takes half as many rows at once; one row may still fit if there are more workers.
        return _note(text, OUT_OF_MEMORY, micro_batch, final=micro_batch == 1 and not elastic)
    if is_lost_worker(error):
        return _note("another worker of the group was lost, or hangs", "LostWorker", micro_batch, final=False)
    passes = not isinstance(error, DDMError) or error.passes
    # Of two launches one goes on; within one launch the newer attempt is its next try.
    passes |= isinstance(error, Superseded) and error.by_its_own_launch
    fix = error.to_fields()["fix"] if isinstance(error, DDMError) else None
    return _note(text, type(error).__name__, micro_batch, final=not passes, fix=fix)


def hang_note(text: str, micro_batch: int) -> dict[str, Any]:
    """Fields of the note of an attempt with a rank that hangs."""
    return _note(text, "Stuck", micro_batch, final=False)


def _note(error: str, kind: str, micro_batch: int, final: bool, fix: Any = None) -> dict[str, Any]:
    return {"error": error, "kind": kind, "final": final, "micro_batch": micro_batch, "fix": fix}
