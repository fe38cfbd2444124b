"""island.sbatch in a real Slurm: where Debian's slurm-wlm and munge are installed, as root, and by --every-call."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import slurm
from tests.conftest import ddm, wait_for
from tests.random_run import make_data

SBATCH = "cluster_configs/slurm/island.sbatch"


@pytest.fixture(scope="module")
def queue(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Queue]:
    if not request.config.getoption("every_call"):
        pytest.skip("asked for by --every-call: minutes")
    if not slurm.INSTALLED:
        pytest.skip("it needs root and Debian's packages slurm-wlm and munge")
    with slurm.queue(tmp_path_factory.mktemp("slurm")) as queue:
        yield queue


def begin(queue: slurm.Queue, tmp_path: Path, *options: str) -> tuple[str, str]:
    """An island that trains for hours, beyond its first saved state: the job's number and the run."""
    run = str(tmp_path / "run")
    make_data(run, "tiny", ("expert.train.steps=10000000",))
    number = queue.submit(*options, SBATCH, run, "--island", "north")
    wait_for(lambda: saved(tmp_path), 180, lambda: queue.printed(number)[-3000:], every=1)
    return number, run


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
    status = ddm("status", str(tmp_path / "run")).stdout
    assert len(re.findall(r"^  (?:experts/00[01]|router) +finished", status, re.MULTILINE)) == 3, status
    assert not (queue.folder / f".ddm/slurm-{number}").exists()


def test_a_job_saves_a_state_before_its_time_is_over_and_is_queued_again(queue: slurm.Queue, tmp_path: Path) -> None:
    number, _ = begin(queue, tmp_path)
    before = saved(tmp_path)
    # The queue's own signal comes by the minute: the same one, to the script alone, at once.
    queue.command("scancel", "--batch", "--signal=TERM", number)
    wait_for(lambda: queue.job(number)["Restarts"] == "1", 90, lambda: queue.printed(number)[-3000:], every=1)
    assert f"step {saved(tmp_path)} is saved" in queue.printed(number) and saved(tmp_path) > before
    left = saved(tmp_path)
    wait_for(lambda: saved(tmp_path) > left, 240, lambda: queue.printed(number)[-3000:], every=1)
    assert "an attempt was lost" not in queue.printed(number)
    queue.command("scancel", number)


def test_an_island_that_is_drained_saves_a_state_and_its_job_is_complete(queue: slurm.Queue, tmp_path: Path) -> None:
    number, run = begin(queue, tmp_path)
    before = saved(tmp_path)
    assert ddm("islands", "drain", run, "north").returncode == 0
    queue.wait_for_state(number, "COMPLETED", 180)
    assert saved(tmp_path) > before


def test_a_cancelled_job_leaves_no_token_and_is_not_queued_again(queue: slurm.Queue, tmp_path: Path) -> None:
    number, _ = begin(queue, tmp_path)
    home = queue.folder / f".ddm/slurm-{number}"
    assert home.exists()
    queue.command("scancel", number)
    wait_for(lambda: not queue.command("squeue", "--noheader"), 90, every=1)
    assert not home.exists()
    assert queue.job(number)["JobState"] == "CANCELLED"
