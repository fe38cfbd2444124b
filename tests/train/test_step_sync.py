"""The exchange of each step, between real ranks over gloo."""

import json
import subprocess
import sys

import pytest
import torch

from ddm_ray.train.step_sync import Agreed, Flags, StepResult, StepSync
from tests.pretend_streams import pretended

pytestmark = pytest.mark.contract

RANKS = """
import json, os, tempfile
import torch.distributed as dist, torch.multiprocessing as mp
from dataclasses import astuple
from ddm_ray.train.step_sync import Flags, reduce_flags

def rank_main(rank, rendezvous):
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=3)
    one = rank == 1
    flags = Flags(leaving=rank == 2, saving=rank < 2, refused=True, unsavable=one, checkpoint_due=one)
    loss, flags = reduce_flags([1.0, 2.0, 6.0][rank], flags)
    os.write(1, json.dumps([loss, *astuple(flags)]).encode() + b"\\n")  # in one piece
    dist.destroy_process_group()

mp.start_processes(rank_main, (tempfile.mktemp(),), 3, start_method="fork")
"""


def test_the_loss_is_the_mean_over_ranks_and_a_flag_is_raised_by_any() -> None:
    done = subprocess.run([sys.executable, "-c", RANKS], capture_output=True, text=True, timeout=120, check=True)
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        [3.0, True, False, True, True, True, False, True]
    ] * 3


def scalar(value: float, device: str) -> torch.Tensor:
    return torch.full((), value, dtype=torch.float64, device=device)


def test_on_a_cpu_a_step_is_known_at_once(world_of_one: None) -> None:
    sync = StepSync()
    for step in range(3):
        flags = Flags(checkpoint_due=step == 1)
        agreed = sync.exchange(step, scalar(0.5 + step, "cpu"), scalar(2.0, "cpu"), flags)
        assert agreed == Agreed((StepResult(step, 0.5 + step, 2.0),), flags)
        assert sync.finish(agreed) == agreed


def test_on_a_gpu_a_step_is_known_once_the_next_one_is_under_way(world_of_one: None) -> None:
    """The host waits for the step before alone, and flags are of now."""
    with pretended() as gpu:
        sync, known = StepSync(), tuple[StepResult, ...]()
        for step in range(3):
            waits = gpu.waits.total()
            flags = Flags(checkpoint_due=step == 1)
            agreed = sync.exchange(step, scalar(0.5 + step, "meta"), scalar(2.0, "meta"), flags)
            assert agreed.any_rank == flags
            assert gpu.waits.total() - waits == (1 if step else 0), gpu.waits
            known += agreed.results
            assert known == tuple(StepResult(done, 0.5 + done, 2.0) for done in range(step))
        last = Agreed((), flags)
        assert sync.finish(last) == Agreed((StepResult(2, 2.5, 2.0),), flags)
        assert sync.finish(last) == last
