"""Python objects between the ranks of a torch.distributed world, and facts about that world."""

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from ddm_ray.errors import DDMError

T = TypeVar("T")


def backend(use_gpu: bool) -> str:
    """Backend of a world: tensors on GPUs travel between GPUs by nccl, all control between CPUs by gloo."""
    return "cpu:gloo,cuda:nccl" if use_gpu else "gloo"


def ranks_on_this_machine() -> int:
    """Number of ranks of this world that share this machine's memory."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def gather_objects(value: T) -> list[T]:
    """The values of all ranks, in their order. Every rank must call it."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def decide_on_first(decide: Callable[[], T]) -> T:
    """Call `decide` on rank 0 alone, and return its result on all ranks; an error that it raises, all ranks raise.

    Every rank must call it.
    """
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome = [decide(), None]
        except DDMError as error:
            outcome = [None, error]
        except Exception as error:  # without an answer the other ranks would wait for ever
            outcome = [None, RuntimeError(f"{type(error).__name__}: {error}")]
    dist.broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]  # type: ignore[no-any-return]
