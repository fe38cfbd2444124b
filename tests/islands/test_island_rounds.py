"""Islands brought up and down again and again, at rest and beside busy processes: `make soak` asks for it."""

import os
import signal
import time
from pathlib import Path

import pytest

from ddm_ray.islands import ports
from ddm_ray.islands.local_files import IslandFolder
from ddm_ray.islands.processes import Leader, members, processes
from tests.conftest import ddm
from tests.processes import command, crowd, family

NUMBER = 3


@pytest.mark.parametrize("busy", [0, 8])
def test_rounds(request: pytest.FixtureRequest, tmp_path: Path, busy: int) -> None:
    """All come up each time; each second time a head is killed first; nothing is ever left."""
    rounds = request.config.getoption("island_rounds")
    if not rounds:
        pytest.skip("asked for by --island-rounds N")
    folder, failures = IslandFolder(tmp_path / "islands"), []
    for number in range(rounds):
        began = time.monotonic()
        with crowd(busy):
            up = ddm("islands", "up", "--local", str(NUMBER), "--folder", str(folder.path), timeout=1200)
            took, records = time.monotonic() - began, folder.islands()
            if number % 2 and records:
                for pid in family(records[0].pid):
                    if command(pid).split(" ")[0].endswith(("gcs_server", "raylet")):
                        os.kill(pid, signal.SIGKILL)
            down = ddm("islands", "down", "--folder", str(folder.path), timeout=300)
        everything = processes()
        left = [process for record in records for process in members(everything, Leader(record.mark))]
        left += [pid for pid in everything if any(record.temp in command(pid) for record in records)]
        used = [port for record in records for port in ports.in_use(record.base)]
        tries = up.stdout.count("; try ")
        print(f"load {busy}: up {took:.0f} s, {tries} tries more, up and down {time.monotonic() - began:.0f} s")
        if up.returncode or down.returncode or len(records) != NUMBER or left or used:
            failures.append((number, up.stdout + up.stderr + down.stdout + down.stderr, left, used))
    assert not failures, failures
