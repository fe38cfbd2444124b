"""What the note of an attempt says of the error that ended it."""

import errno
import os

import pytest
import torch

from ddm_ray.errors import ConfigError, OutOfMemory, StorageError, Superseded, TrainingError
from ddm_ray.placement import TrainPlacement
from ddm_ray.run.graph import expert
from ddm_ray.run.run import Run
from ddm_ray.train import worker
from ddm_ray.train.failures import blame_micro_batch, failure_note, is_lost_worker, is_out_of_memory

pytestmark = pytest.mark.contract


def superseded(by_its_own_launch: bool) -> Superseded:
    error = Superseded("attempt 1: attempt 2 has overtaken it")
    error.by_its_own_launch = by_its_own_launch
    return error


@pytest.mark.parametrize(
    ("error", "kind", "final"),
    [
        (TrainingError("loss nan"), "TrainingError", True),
        (ConfigError("wrong"), "ConfigError", True),
        (StorageError("away", passes=True), "StorageError", False),
        (StorageError("full", passes=False), "StorageError", True),
        (RuntimeError("a bug"), "RuntimeError", False),
        (RuntimeError("[gloo/transport/tcp/pair.cc:598] Connection closed by peer"), "LostWorker", False),
        (superseded(by_its_own_launch=False), "Superseded", True),
        (superseded(by_its_own_launch=True), "Superseded", False),
        (OutOfMemory("micro_batch 4"), "OutOfMemory", False),
    ],
)
def test_a_launch_tries_again_if_that_may_help(error: Exception, kind: str, final: bool) -> None:
    note = failure_note(error, micro_batch=4, elastic=False)
    assert (note["kind"], note["final"], note["micro_batch"]) == (kind, final, 4)


def test_one_row_that_does_not_fit_may_fit_in_more_workers() -> None:
    error = OutOfMemory("micro_batch 1")
    assert [failure_note(error, 1, elastic)["final"] for elastic in (False, True)] == [True, False]


def test_errors_of_memory_and_of_other_ranks_are_known() -> None:
    texts = (
        "can't start new thread",
        "can't allocate memory",
        "CUDA driver error: out of memory",
        "Triton Error [CUDA]: out of memory",
    )
    of_memory = (torch.OutOfMemoryError("x"), MemoryError(), *map(RuntimeError, texts))
    of_memory += (torch.AcceleratorError("CUDA error: out of memory"),)
    of_memory += tuple(OSError(number, os.strerror(number)) for number in (errno.EAGAIN, errno.ENOMEM))
    of_a_rank = RuntimeError("gloo/transport")
    assert all(map(is_out_of_memory, of_memory)) and not any(map(is_lost_worker, of_memory))
    assert is_lost_worker(of_a_rank) and not is_out_of_memory(of_a_rank)
    assert not is_out_of_memory(OSError(errno.ENOSPC, "no space")) and not is_out_of_memory(
        BlockingIOError(11, "x", "f")
    )


def test_memory_that_runs_out_is_blamed_on_the_micro_batch() -> None:
    with pytest.raises(OutOfMemory, match=r"^micro_batch 8: no room$"), blame_micro_batch(8):
        raise torch.OutOfMemoryError("no room")
    with pytest.raises(ValueError, match="other"), blame_micro_batch(8):
        raise ValueError("other")


def test_a_state_that_does_not_fit_is_refused_before_any_step(
    world_of_one: None, short_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may pass: an attempt before this one may be about to end."""

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 11.12 GiB.")

    monkeypatch.setattr(worker, "Engine", full)
    words = r"experts/001: .* weights and optimizer, by ZeRO stage 1 on 1 \(CUDA out .* 11.12 GiB\.\); give it more"
    with pytest.raises(ConfigError, match=words) as refused:
        worker.train(short_run.url, expert(1), TrainPlacement())
    assert refused.value.passes
