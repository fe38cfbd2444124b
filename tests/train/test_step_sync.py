"""The exchange of each step, between real ranks over gloo."""

import json
import math
import subprocess
import sys

import pytest
import torch

from ddm_ray.train.step_sync import Flags, StepResult, StepResults, exchange
from tests.pretend_streams import pretended

RANKS = """
import json, os, tempfile
import torch.distributed as dist, torch.multiprocessing as mp
from dataclasses import astuple
from ddm_ray.train.step_sync import Flags, exchange

def rank_main(rank, rendezvous):
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=3)
    flags = Flags(leaving=rank == 2, writing=False, saving=rank < 2, refused=True, hopeless=rank == 1, due=rank == 1)
    loss, flags = exchange([1.0, 2.0, 6.0][rank], flags)
    os.write(1, json.dumps([loss, *astuple(flags)]).encode() + b"\\n")  # in one piece
    dist.destroy_process_group()

mp.start_processes(rank_main, (tempfile.mktemp(),), 3, start_method="fork")
"""


def test_the_loss_is_the_mean_over_ranks_and_a_flag_is_raised_by_any() -> None:
    done = subprocess.run([sys.executable, "-c", RANKS], capture_output=True, text=True, timeout=120, check=True)
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        [3.0, True, False, True, True, True, False, True]
    ] * 3


def test_a_world_of_one_keeps_what_it_has(world_of_one: None) -> None:
    flags = Flags(writing=True)
    assert exchange(0.1, flags) == (0.1, flags)


def scalar(value: float, device: str) -> torch.Tensor:
    return torch.full((), value, dtype=torch.float64, device=device)


def test_on_a_cpu_a_step_is_known_at_once(world_of_one: None) -> None:
    results = StepResults()
    for step in range(3):
        known, flags = results.exchange(step, scalar(0.5 + step, "cpu"), scalar(2.0, "cpu"), Flags(due=step == 1))
        assert known == [StepResult(step, 0.5 + step, 2.0)] and flags == Flags(due=step == 1)
    assert results.rest() == []


def test_on_a_gpu_a_step_is_known_once_the_next_one_is_under_way(world_of_one: None) -> None:
    """The host waits for the step before alone, and flags are of now."""
    with pretended() as gpu:
        results, known = StepResults(), list[StepResult]()
        for step in range(3):
            waits = gpu.waits.total()
            outcome, flags = results.exchange(
                step, scalar(0.5 + step, "meta"), scalar(2.0, "meta"), Flags(due=step == 1)
            )
            assert flags == Flags(due=step == 1)
            assert gpu.waits.total() - waits == (1 if step else 0), gpu.waits
            known += outcome
            assert known == [StepResult(done, 0.5 + done, 2.0) for done in range(step)]
        assert results.rest() == [StepResult(2, 2.5, 2.0)]
        assert results.rest() == []


@pytest.mark.parametrize(("loss", "norm", "finite"), [(1.0, 2.0, True), (math.nan, 2.0, False), (1.0, math.inf, False)])
def test_a_result_that_training_ends_by(loss: float, norm: float, finite: bool) -> None:
    assert StepResult(0, loss, norm).finite is finite
