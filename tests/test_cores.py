"""Cores that this process may use, in a container too, and how jobs share them."""

import os
from pathlib import Path

import pytest

from ddm_ray import cores, memory
from ddm_ray.cli.train import sharing
from ddm_ray.cores import threads_for, usable_cores
from ddm_ray.placement import TrainPlacement, Workers

V2, V1 = ("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")


@pytest.fixture
def cores_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The control group of a machine of 16 cores, without a limit."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (tmp_path / "cgroup").write_text("3:cpu,cpuacct:/job/step\n2:memory:/other\n0::/job/step\n")
    (tmp_path / "job/step").mkdir(parents=True)
    monkeypatch.setattr(memory, "GROUPS", str(tmp_path / "cgroup"))
    monkeypatch.setattr(cores, "QUOTAS", ((str(tmp_path), "", V2), (str(tmp_path), "cpu", V1)))
    return tmp_path


@pytest.mark.parametrize(
    ("place", "files", "expected"),
    [
        ("job/step", {}, 16),
        ("job/step", {"cpu.max": "max 100000"}, 16),
        ("job/step", {"cpu.max": "350000 100000"}, 3),
        ("job", {"cpu.max": "50000 100000"}, 1),
        (".", {"cpu.max": "3200000 100000"}, 16),
        ("job", {"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}, 16),
        ("job", {"cpu.cfs_quota_us": "400000", "cpu.cfs_period_us": "100000"}, 4),
    ],
)
def test_a_quota_of_a_container_counts(cores_of: Path, place: str, files: dict[str, str], expected: int) -> None:
    """Its own, or that of a group around it; affinity where that is less."""
    for name, content in files.items():
        (cores_of / place / name).write_text(f"{content}\n")
    assert usable_cores() == expected


def test_an_affinity_counts() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize(
    ("cpus", "limit", "expected"),
    [(0.33, None, 1), (1.0, None, 1), (3.9, None, 3), (64, None, 16), (8, "2", 2), (8, "0", 8), (8, "x", 8)],
)
def test_threads_are_of_whole_cpus_that_are_there(
    cores_of: Path, monkeypatch: pytest.MonkeyPatch, cpus: float, limit: str | None, expected: int
) -> None:
    if limit is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", limit)
    assert threads_for(cpus) == expected


@pytest.mark.parametrize(
    ("workers", "jobs", "cores", "expected"),
    [
        (1, 1, 2, 2),
        (1, 2, 2, 1),
        (1, 5, 2, 1),
        (1, 1, 0, 1),
        (1, 5, 16, 3),
        (2, 1, 16, 8),
        (2, 3, 16, 2),
        (8, 4, 2, 1),
    ],
)
def test_jobs_and_their_workers_share_the_cores(workers: int, jobs: int, cores: int, expected: int) -> None:
    """None asks for more than there is for as many as run at once."""
    given = TrainPlacement(workers=Workers(min=1, max=workers), resources_per_worker={"CPU": 1.0, "memory": 4e9})
    assert sharing(given, jobs, cores).resources_per_worker == {"CPU": expected, "memory": 4e9}


@pytest.mark.parametrize(("load", "words"), [(5.9, ""), (42.2, "; this machine is busy (load 42, cores 2)")])
def test_a_load_is_named_where_it_explains_a_wait(monkeypatch: pytest.MonkeyPatch, load: float, words: str) -> None:
    monkeypatch.setattr(cores, "usable_cores", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 1.0, 1.0))
    assert cores.busy_words() == words
