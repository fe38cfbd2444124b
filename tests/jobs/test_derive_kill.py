"""A run is derived and copied, killed at its n-th write by SIGKILL: what is left is no run or a sound one.

The same commands then end in the same bytes, and change none of the base.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from ddm_ray.errors import RunError
from ddm_ray.jobs.examination import examine
from ddm_ray.run.base import FILE
from ddm_ray.run.run import Run
from tests.conftest import ROOT
from tests.data.appended import make_base, sums

pytestmark = pytest.mark.chaos

KILLED = """
import os, signal, sys
from ddm_ray.jobs.copying import copy_kept
from ddm_ray.run.run import Run
from ddm_ray.store.store import Store
from tests.derived import derive

put, writes, last = Store._put, 0, -1

def die(self, *arguments, **options):
    global writes
    if writes == last:
        os.kill(os.getpid(), signal.SIGKILL)
    writes += 1
    return put(self, *arguments, **options)

Store._put = die
base, url, every = sys.argv[1], sys.argv[2], int(sys.argv[3])

def make(url):
    copy_kept(derive(Run.open(base), "sample.steps=3", url=url, drop=(2,)), lambda share, key: None)

make(f"{url}-quiet")
print(writes, flush=True)
for last in range(0, writes, every):
    child = os.fork()
    if not child:
        writes = 0
        make(f"{url}-{last}")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -9, last
"""
EVERY = 3


def test_killed_at_any_write_it_is_finished_by_the_same_command(tmp_path: Path) -> None:
    from ddm_ray.jobs.copying import copy_kept
    from tests.derived import derive

    base = make_base(tmp_path, "partition.num_clusters=4", "partition.num_fine=16")
    before, url = sums(base), str(tmp_path / "less")
    command = [sys.executable, "-c", KILLED, base.url, url, str(EVERY)]
    done = subprocess.run(command, cwd=ROOT, check=True, timeout=300, stdout=subprocess.PIPE, text=True)
    writes = int(done.stdout)
    assert writes > 20
    quiet = Run.open(f"{url}-quiet")
    states = set[str]()
    for last in range(0, writes, EVERY):
        try:
            left = Run.open(f"{url}-{last}")
        except RunError:
            states.add("no run")
        else:
            states.add("copied" if left.base is None else "derived")
            assert not [finding for finding in examine(left, deep=True) if finding.error], last
        copy_kept(derive(base, "sample.steps=3", url=f"{url}-{last}", drop=(2,)), lambda share, key: None)
        run = Run.open(f"{url}-{last}")
        assert run.base is None and not [finding for finding in examine(run, deep=True) if finding.error]
        assert {k: v for k, v in sums(run).items() if k != FILE} == {k: v for k, v in sums(quiet).items() if k != FILE}
    assert states >= {"no run", "derived"} and sums(base) == before
