"""Appending killed at its n-th write, by SIGKILL: the same commands end in the same bytes, and none is the base's."""

from pathlib import Path
from shutil import copytree

import pytest

from ddm_ray.run.base import derived_from
from ddm_ray.run.graph import CENTROIDS, PARTITION, REPORT, ROUTER, ROWS, expert, shard
from ddm_ray.run.inputs import beginnings_of
from ddm_ray.run.run import Run
from tests.data.appended import make_base, make_data, sums, write_digits
from tests.derived import append
from tests.killed_writes import kill_at_writes

pytestmark = pytest.mark.chaos

EVERY, MOST = 7, 84


def append_new(url: str) -> Run:
    """Derive a run with the new files of its source, and make its data."""
    run = append(Run.open(url), {"expert": 20}).run
    make_data(run)
    return run


def test_killed_at_any_write_it_is_finished_by_the_same_commands(tmp_path: Path) -> None:
    base = make_base(tmp_path, num_rows=120)
    write_digits(tmp_path / "photos", range(120, 150))
    for name in ("quiet", *range(0, MOST, EVERY)):
        copytree(base.url, tmp_path / f"copy-{name}")
    killed = kill_at_writes("tests.data.test_append_kill:append_new", str(tmp_path / "copy"), EVERY)
    assert max(killed) < MOST
    [url] = derived_from(Run.open(str(tmp_path / "copy-quiet")).store)
    quiet = Run.open(url)
    made = (ROWS, CENTROIDS, shard(0), shard(1), PARTITION, REPORT)
    for last in killed:
        copy = Run.open(str(tmp_path / f"copy-{last}"))
        run = append_new(copy.url)
        assert derived_from(copy.store) == [run.url], last
        assert [run.require(each).files for each in made] == [quiet.require(each).files for each in made], last
        for each in beginnings_of(run.config):
            assert run.finished(each) is None or run.require(each).digest == quiet.require(each).digest
        assert all(run.finished(each) for job in (expert(0), expert(1), ROUTER) for each in run.inputs(job))
        assert sums(copy) == sums(base), last
