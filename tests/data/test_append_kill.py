"""Appending killed at its n-th write, by SIGKILL: the same commands end in the same bytes, and none is the base's."""

import subprocess
import sys
from pathlib import Path
from shutil import copytree

import pytest

from ddm_ray.run.base import derived_from
from ddm_ray.run.graph import CENTROIDS, PARTITION, REPORT, ROUTER, ROWS, expert, shard
from ddm_ray.run.inputs import beginnings_of
from ddm_ray.run.run import Run
from tests.conftest import ROOT
from tests.data.appended import make_base, make_data, sums, write_digits
from tests.derived import append

pytestmark = pytest.mark.chaos

KILLED = """
import os, signal, sys
from ddm_ray.run.run import Run
from ddm_ray.store.store import Store
from tests.data.appended import make_data
from tests.derived import append

put, writes = Store._put, 0

def die(self, *arguments, **options):
    global writes
    if writes == last:
        os.kill(os.getpid(), signal.SIGKILL)
    writes += 1
    return put(self, *arguments, **options)

Store._put = die
base, every = sys.argv[1], int(sys.argv[2])
make_again = lambda url: make_data(append(Run.open(url), {"expert": 20}).run)
last = -1
make_again(f"{base}-quiet")
print(writes)
for last in range(0, writes, every):
    child = os.fork()
    if not child:
        writes = 0
        make_again(f"{base}-{last}")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -9, last
"""
EVERY, MOST = 7, 84


def test_killed_at_any_write_it_is_finished_by_the_same_commands(tmp_path: Path) -> None:
    base = make_base(tmp_path, num_rows=120)
    write_digits(tmp_path / "photos", range(120, 150))
    for name in ("quiet", *range(0, MOST, EVERY)):
        copytree(base.url, tmp_path / f"copy-{name}")
    command = [sys.executable, "-c", KILLED, str(tmp_path / "copy"), str(EVERY)]
    done = subprocess.run(command, cwd=ROOT, check=True, timeout=300, stdout=subprocess.PIPE, text=True)
    writes = int(done.stdout)
    assert 20 < writes <= MOST
    [url] = derived_from(Run.open(str(tmp_path / "copy-quiet")).store)
    quiet = Run.open(url)
    made = (ROWS, CENTROIDS, shard(0), shard(1), PARTITION, REPORT)
    for last in range(0, writes, EVERY):
        copy = Run.open(str(tmp_path / f"copy-{last}"))
        run = append(copy, {"expert": 20}).run
        make_data(run)
        assert derived_from(copy.store) == [run.url], last
        assert [run.require(each).files for each in made] == [quiet.require(each).files for each in made], last
        for each in beginnings_of(run.config):
            assert run.finished(each) is None or run.require(each).digest == quiet.require(each).digest
        assert all(run.finished(each) for job in (expert(0), expert(1), ROUTER) for each in run.inputs(job))
        assert sums(copy) == sums(base), last
