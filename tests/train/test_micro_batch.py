"""Memory that runs out halves what is taken at once; where asked, the most that fits is found before."""

import json
import os
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddm_ray.memory import KEEP_FREED_MEMORY
from ddm_ray.storage.attempts import OUT_OF_MEMORY, Attempt, claim
from ddm_ray.storage.graph import Artifact
from ddm_ray.storage.run import Run
from ddm_ray.storage.store import Store
from ddm_ray.train.claiming import most_rows
from ddm_ray.train.micro_batch import largest
from tests.random_run import make_data

EXPERT, SHARE = Artifact("experts/001"), 192


def attempts(folder: Path, micro_batch: object, mebibytes: int) -> tuple[Run, list[int]]:
    """Train where a share of SHARE rows doesn't fit: the run, and the micro-batches that its attempts had.

    The operating system refuses real allocations, in one process an attempt and with glibc set as in life.
    """
    model = ("expert.model.width=128", "expert.model.depth=4", "expert.model.patch_size=1")
    settings = ("expert.train.steps=2", f"expert.train.global_batch={2 * SHARE}", *model)
    run = make_data(str(folder / "run"), settings=settings)
    command = [sys.executable, str(Path(__file__).parent / "memory.py"), run.url, str(mebibytes)]
    command.append(json.dumps(micro_batch))
    environment = os.environ | KEEP_FREED_MEMORY
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert run.require(EXPERT).info["step"] == 2
    return run, [int(line) for line in done.stdout.split()]


def test_running_out_of_memory_halves_what_is_taken_at_once(tmp_path: Path) -> None:
    _, tried = attempts(tmp_path, None, 600)
    assert len(tried) > 1 and tried == [SHARE // 2**number for number in range(len(tried))]


def test_the_largest_that_fits_is_found(tmp_path: Path) -> None:
    """In one attempt, none of whose trials ran out of memory; three times as many do."""
    _, (chosen,) = attempts(tmp_path / "largest", "largest", 600)
    assert 21 < chosen <= 48
    more = 3 * chosen
    _, (first, *others) = attempts(tmp_path / "more", more, 600)
    assert first == more and others


@given(st.integers(0, 64_000), st.integers(7, 32_768), st.integers(1, 5000), st.integers(0, 62_000))
def test_what_is_found_fits_and_no_trial_takes_more(always: int, each: int, share: int, hidden: int) -> None:
    """But one or two rows, and what memory taken before hides of the first ones: then less may be found too."""
    tried = []

    def trial(rows: int) -> float:
        tried.append(rows)
        return max(hidden, always + each * rows) / 2**16  # which is exact

    chosen = largest(trial, share)
    best = max(1, min(share, (2**16 - always) // each))
    if hidden <= always + each:
        assert chosen in (best, best - 1) and max(tried) <= max(2, best)
    assert max(1, best // 2) <= chosen <= best
    assert len(tried) <= 2 * share.bit_length() + 1


@pytest.mark.parametrize("jump", range(10))
def test_something_else_that_takes_memory_meanwhile_does_not_end_the_search(jump: int) -> None:
    """A tenth, from one of the trials on: between two it looks like rows that take as much."""
    trials = count()
    assert largest(lambda rows: 0.05 + 0.001 * rows + 0.1 * (next(trials) >= jump), 600) > 300


def test_a_new_launch_looks_again_and_another_number_of_ranks(tmp_path: Path) -> None:
    """Within a launch what the last attempt of as many ranks found is taken, or half of what then ran out."""
    store = Store(str(tmp_path))
    like = {"asked": {"micro_batch": "largest"}, "world_size": 2, "launch": "a"}
    assert most_rows(store, EXPERT, like) is None
    claim(store, EXPERT, like | {"most_rows": None})
    assert most_rows(store, EXPERT, like) is None, "it hasn't found any"
    Attempt(store, EXPERT, 1).beat({"micro_batch": 48})
    claim(store, EXPERT, like | {"world_size": 3, "most_rows": 64})
    assert [most_rows(store, EXPERT, like | {"world_size": world}) for world in (1, 2, 3)] == [None, 48, 64]
    assert most_rows(store, EXPERT, like | {"launch": "b"}) is None
    Attempt(store, EXPERT, 2).fail({"error": "no memory", "kind": OUT_OF_MEMORY, "final": False, "micro_batch": 40})
    assert most_rows(store, EXPERT, like | {"world_size": 3}) == 20
    for damaged in (-1, 1.5, "many", None):
        Attempt(store, EXPERT, 1).beat({"micro_batch": damaged})
        assert most_rows(store, EXPERT, like) is None
