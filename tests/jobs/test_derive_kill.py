"""A run is derived and copied, killed at its n-th write by SIGKILL: what is left is no run or a sound one.

The same commands then end in the same bytes, and change none of the base.
"""

from pathlib import Path

import pytest

from ddm_ray.errors import RunError
from ddm_ray.jobs.copying import copy_kept
from ddm_ray.jobs.examination import examine
from ddm_ray.run.base import FILE
from ddm_ray.run.run import Run
from tests.data.appended import make_base, sums
from tests.derived import derive
from tests.killed_writes import kill_at_writes

pytestmark = pytest.mark.chaos


def make_less(url: str) -> None:
    """Derive a run without a cluster from the one beside it, and copy what it keeps."""
    base = Run.open(str(Path(url).parent / "run"))
    copy_kept(derive(base, "sample.steps=3", url=url, drop=(2,)), lambda share, key: None)


def test_killed_at_any_write_it_is_finished_by_the_same_command(tmp_path: Path) -> None:
    base = make_base(tmp_path, "partition.num_clusters=4", "partition.num_fine=16")
    before, url = sums(base), str(tmp_path / "less")
    killed = kill_at_writes("tests.jobs.test_derive_kill:make_less", url, 3)
    quiet = Run.open(f"{url}-quiet")
    states = set[str]()
    for last in killed:
        try:
            left = Run.open(f"{url}-{last}")
        except RunError:
            states.add("no run")
        else:
            states.add("copied" if left.base is None else "derived")
            assert not [finding for finding in examine(left, deep=True) if finding.error], last
        make_less(f"{url}-{last}")
        run = Run.open(f"{url}-{last}")
        assert run.base is None and not [finding for finding in examine(run, deep=True) if finding.error]
        assert {k: v for k, v in sums(run).items() if k != FILE} == {k: v for k, v in sums(quiet).items() if k != FILE}
    assert states >= {"no run", "derived"} and sums(base) == before
