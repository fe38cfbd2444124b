import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.traced import DiskFault

pytestmark = pytest.mark.contract

# Of the calls that change the disk, each so many-th meets the fault, the first and the last always; all of them in
# the tier chaos. A full disk stays full, so what it leaves differs little from one call to the next.
STRIDES = {DiskFault.KILL: 2, DiskFault.FULL: 15}


@pytest.mark.parametrize(
    "fault", [DiskFault.FULL, pytest.param(DiskFault.KILL, marks=pytest.mark.chaos)], ids=lambda fault: fault.name
)
@pytest.mark.parametrize("stage", [pytest.param("prepare", marks=pytest.mark.chaos), "partition"])
def test_a_fault_at_any_write_leaves_the_old_or_the_new(
    tmp_path: Path, every: bool, stage: str, fault: DiskFault
) -> None:
    stride = 1 if every else STRIDES[fault]
    runs, scratch = tmp_path / "runs", tmp_path / "scratch"  # which a partition that is killed leaves
    runs.mkdir()
    scratch.mkdir()
    command = [sys.executable, "-m", "tests.data.disk_faults", stage, str(runs), fault.name, str(stride)]
    environment = {**os.environ, "TMPDIR": str(scratch)}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=6000, env=environment)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    num_calls, num_states, *kinds = done.stdout.splitlines()[-1].split()
    assert {"write", "fsync", "rename", "link"} <= set(kinds)
    assert int(num_calls) > 30
    assert int(num_states) > (3 if fault is DiskFault.FULL else 9)


@pytest.mark.parametrize("writer", ["states", "prepare", pytest.param("partition", marks=pytest.mark.chaos)])
def test_a_power_cut_at_any_moment_leaves_the_old_or_the_new(tmp_path: Path, every: bool, writer: str) -> None:
    """No file has a name before its bytes are on the disk, and what is done stays, in new folders, too."""
    runs, scratch = tmp_path / "runs", tmp_path / "scratch"
    runs.mkdir()
    scratch.mkdir()
    command = [sys.executable, "-m", "tests.data.power_cuts", writer, str(runs), "200" if every else "5"]
    environment = {**os.environ, "TMPDIR": str(scratch)}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=6000, env=environment)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert int(done.stdout.splitlines()[-1]) >= 10
