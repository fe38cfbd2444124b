"""Memory that runs out halves what is taken at once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddm_ray.jobs.attempts import OUT_OF_MEMORY, Attempt, claim
from ddm_ray.memory import KEEP_FREED_MEMORY
from ddm_ray.run.graph import Artifact
from ddm_ray.store.store import Store
from ddm_ray.train.claiming import rows_that_fit
from tests.random_run import make_data

pytestmark = pytest.mark.contract

EXPERT, SHARE = Artifact("experts/001"), 192


def attempts(folder: Path, mebibytes: int) -> list[int]:
    """Train where a share of SHARE rows doesn't fit: the micro-batches that its attempts had.

    The operating system refuses real allocations, in one process an attempt and with glibc set as in life.
    """
    model = ("expert.model.width=128", "expert.model.depth=4", "expert.model.patch_size=1")
    settings = ("expert.train.steps=2", f"expert.train.batch={SHARE}", *model)
    run = make_data(str(folder / "run"), settings=settings)
    command = [sys.executable, str(Path(__file__).parent / "memory.py"), run.url, str(mebibytes)]
    environment = os.environ | KEEP_FREED_MEMORY
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert run.require(EXPERT).info["step"] == 2
    return [int(line) for line in done.stdout.split()]


def test_running_out_of_memory_halves_what_is_taken_at_once(tmp_path: Path) -> None:
    tried = attempts(tmp_path, 600)
    assert len(tried) > 1 and tried == [SHARE // 2**number for number in range(len(tried))]


def test_what_ran_out_of_memory_is_halved_for_those_who_ask_alike(tmp_path: Path) -> None:
    """And what was halved stays so, in later launches too."""
    store = Store(str(tmp_path))
    like = {"asked": {"micro_batch": 40}}
    assert rows_that_fit(store, EXPERT, like) is None
    claim(store, EXPERT, like | {"most_rows": None, "launch": "a"})
    assert rows_that_fit(store, EXPERT, like) is None
    Attempt(store, EXPERT, 1).fail({"error": "no memory", "kind": OUT_OF_MEMORY, "final": False, "micro_batch": 40})
    assert rows_that_fit(store, EXPERT, like) == 20
    claim(store, EXPERT, like | {"most_rows": 20, "launch": "b"})
    assert rows_that_fit(store, EXPERT, like) == 20
    assert rows_that_fit(store, EXPERT, {"asked": {"micro_batch": 64}}) is None
