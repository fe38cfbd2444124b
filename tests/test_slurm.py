"""island.sbatch in a real Slurm: where Debian's slurm-wlm and munge are installed, as root."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import slurm
from tests.conftest import ddm, wait_for
from tests.random_run import make_data

pytestmark = pytest.mark.chaos
SBATCH = "cluster_configs/slurm/island.sbatch"


@pytest.fixture(scope="module")
def queue(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Queue]:
    if not slurm.INSTALLED:
        pytest.skip("it needs root and Debian's packages slurm-wlm and munge")
    with slurm.queue(tmp_path_factory.mktemp("slurm")) as queue:
        yield queue


@contextmanager
def begun(queue: slurm.Queue, tmp_path: Path) -> Iterator[str]:
    """A job that trains expert 0 for hours, beyond its first saved state: its number. Cancelled in the end."""
    run = str(tmp_path / "run")
    make_data(run, "tiny", ("expert.train.steps=10000000",))
    number = queue.submit(SBATCH, run, "--island", "north", "--only", "expert:0")
    try:
        wait_for(lambda: saved(tmp_path), 180, lambda: queue.printed(number)[-3000:], every=1)
        yield number
    finally:
        queue.command("scancel", "--user=root")
        wait_for(lambda: not queue.command("squeue", "--noheader"), 90, every=1)


def saved(tmp_path: Path) -> int:
    """The newest saved step of expert 0, 0 before the first."""
    states = tmp_path.glob("run/experts/000/attempts/*/state/step-*/_MANIFEST.json")
    return max((int(path.parent.name.removeprefix("step-")) for path in states), default=0)


def test_a_job_trains_all_of_a_run(queue: slurm.Queue, tmp_path: Path) -> None:
    make_data(str(tmp_path / "run"), "tiny", ("expert.train.steps=30", "router.train.steps=30"))
    number = queue.submit(SBATCH, str(tmp_path / "run"), "--island", "north")
    queue.wait_for_state(number, "COMPLETED", 300)
    for model in ("expert 0", "expert 1", "router"):
        assert f"{model.replace('expert ', 'experts/00')} " in queue.printed(number)
    status = ddm("status", str(tmp_path / "run"), "--long").stdout
    assert len(re.findall(r"^  (?:experts/00[01]|router) +finished", status, re.MULTILINE)) == 3, status
    assert not (queue.folder / f".ddm/slurm-{number}").exists()


def test_a_job_saves_a_state_before_its_time_is_over_and_is_queued_again(queue: slurm.Queue, tmp_path: Path) -> None:
    with begun(queue, tmp_path) as number:
        before = saved(tmp_path)
        # The queue sends its own signal up to a minute early: here the same one, to the script alone, at once.
        queue.command("scancel", "--batch", "--signal=TERM", number)
        wait_for(lambda: queue.job(number)["Restarts"] == "1", 90, lambda: queue.printed(number)[-3000:], every=1)
        left = saved(tmp_path)
        # Nobody trains it for some seconds now; an attempt that was killed wouldn't be said to have left.
        assert left > before and f"step {left} is saved" in ddm("status", str(tmp_path / "run")).stdout
        wait_for(lambda: saved(tmp_path) > left, 180, lambda: queue.printed(number)[-3000:], every=1)


def test_an_island_that_is_drained_saves_a_state_and_its_job_is_complete(queue: slurm.Queue, tmp_path: Path) -> None:
    with begun(queue, tmp_path) as number:
        before = saved(tmp_path)
        assert ddm("islands", "drain", str(tmp_path / "run"), "north").returncode == 0
        queue.wait_for_state(number, "COMPLETED", 180)
        assert saved(tmp_path) > before


def test_a_cancelled_job_is_not_queued_again(queue: slurm.Queue, tmp_path: Path) -> None:
    with begun(queue, tmp_path) as number:
        pass
    assert queue.job(number)["JobState"] == "CANCELLED"
