"""The exchange of each step, between real ranks over gloo."""

import json
import subprocess
import sys

import torch

from ddm_ray.train.consensus import Flags, exchange

RANKS = """
import json, os, tempfile, torch
import torch.distributed as dist, torch.multiprocessing as mp
from dataclasses import astuple
from ddm_ray.train.consensus import Flags, exchange

def rank_main(rank, rendezvous):
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=3)
    flags = Flags(leaving=rank == 2, writing=False, saving=rank < 2, refused=True, hopeless=rank == 1, due=rank == 1)
    loss, flags = exchange(torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64)[rank], flags)
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
    assert exchange(torch.tensor(0.1, dtype=torch.float64), flags) == (0.1, flags)
