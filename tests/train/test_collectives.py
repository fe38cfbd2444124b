"""The collectives of a training, each rank's in the same order: recorded before the loop was cut into policies."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.contract

CLAIM = CHOOSE_STATE = LEAVE = ["broadcast_object_list"]
HELDOUT_ROWS = READ_STATE = CHECK_STATE = ["all_gather_object"]
SETTLE = ["all_gather_object", "barrier"]
# The gradient's norm, then loss and flags. Gradients are DeepSpeed's own affair.
STEP = ["step", "all_reduce 1", "all_reduce 8"]
STEP_OF_ONE = ["step", "all_reduce 1"]
SAVE_NOW = [*SETTLE, "all_gather_object", "all_gather_object"]
MEASURE = ["all_reduce 16"]
END = ["barrier"]


@pytest.mark.parametrize("world", [2, pytest.param(1, marks=pytest.mark.chaos)])
def test_collectives_are_the_same_in_the_same_order(tmp_path: Path, world: int) -> None:
    command = [sys.executable, "-m", "tests.train.collectives", str(tmp_path), str(world)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = json.loads(done.stdout.splitlines()[-1])
    step, measure = (STEP, MEASURE) if world > 1 else (STEP_OF_ONE, [])
    left_at_3 = [*CLAIM, *CHOOSE_STATE, *HELDOUT_ROWS, *step, *step, *step, *SAVE_NOW, *LEAVE]
    went_on = [
        *[*CLAIM, *CHOOSE_STATE, *READ_STATE, *CHECK_STATE, *HELDOUT_ROWS],
        *[*step, *step],
        *[*step, *SETTLE],  # the state of step 6
        *[*step, *SETTLE],  # the milestone of step 7
        *[*step, *measure],
        *[*step, *measure, *SAVE_NOW, *END],
    ]
    assert first == [left_at_3] * world
    assert second == [went_on] * world
