"""A job keeps the number of threads that it began with, wherever it goes on, for the same bits."""

from pathlib import Path

import pytest
import torch

from ddm_ray.cores import usable_cores
from ddm_ray.errors import Preempted
from ddm_ray.jobs.attempts import Attempt, claim, claimed
from ddm_ray.placement import TrainPlacement
from ddm_ray.run.graph import expert
from ddm_ray.run.run import Run
from ddm_ray.train import claiming, worker
from ddm_ray.train.claiming import default_threads, threads_of_last_attempt
from ddm_ray.train.job import train_job
from tests.derived import extend
from tests.random_run import make_data
from tests.train.conftest import SHORT
from tests.train.results import curve_of, weights_of

pytestmark = pytest.mark.contract

EXPERT = expert(0)
two_cores = pytest.mark.skipif(usable_cores() < 2, reason="needs two cores")


@pytest.fixture
def many_threads(monkeypatch: pytest.MonkeyPatch, world_of_one: None) -> None:
    """As a user trains: nothing but the placement says how many; the network counts as a large one."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(claiming, "FLOPS_PER_THREAD", 1)


def asking(cpus: float, threads: int | None = None) -> TrainPlacement:
    return TrainPlacement(resources_per_worker={"CPU": cpus}, threads=threads, checkpoint_steps=5)


def train(run: Run, placement: TrainPlacement, leaving_after: int | None = None) -> int:
    """Train to the end, or so many steps; the threads that it computed with."""
    steps = iter(range(1000))
    used = list[int]()

    def notice() -> bool:
        used.append(torch.get_num_threads())
        return next(steps) + 1 == leaving_after

    if leaving_after is None:
        worker.train(run.url, EXPERT, placement, notice)
    else:
        with pytest.raises(Preempted):
            worker.train(run.url, EXPERT, placement, notice)
    (threads,) = set(used)
    return threads


def recorded(run: Run) -> list[int]:
    return [Attempt(run.store, EXPERT, number).claim()["threads"] for number in sorted(claimed(run.store, EXPERT))]


@two_cores
def test_a_job_that_goes_on_elsewhere_has_the_same_threads_and_bits(many_threads: None, tmp_path: Path) -> None:
    """Begun with two, it goes on where it may have one, and the other way round."""
    unbroken = {cpus: make_data(str(tmp_path / f"unbroken-{cpus}"), settings=SHORT) for cpus in (1, 2)}
    for cpus, run in unbroken.items():
        assert train(run, asking(cpus)) == cpus
    for first, then in ((2, 1), (1, 2)):
        run = make_data(str(tmp_path / f"from-{first}"), settings=SHORT)
        assert train(run, asking(first), leaving_after=4) == first
        assert train(run, asking(then)) == first
        assert recorded(run) == [first, first]
        ours, expected = (dict(curve_of(each, EXPERT)) for each in (run, unbroken[first]))
        assert all(ours[name].equal(expected[name]) for name in expected)
        ours, expected = (weights_of(each, EXPERT) for each in (run, unbroken[first]))
        assert all(ours[name].equal(expected[name]) for name in expected)


@two_cores
def test_a_number_that_is_given_wins(many_threads: None, tmp_path: Path) -> None:
    run = make_data(str(tmp_path / "run"), settings=SHORT)
    assert train(run, asking(1, threads=2), leaving_after=4) == 2
    assert train(run, asking(2, threads=1), leaving_after=4) == 1
    assert train(run, asking(2)) == 1, "the last attempt's"
    assert recorded(run) == [2, 1, 1]


@two_cores
def test_a_run_that_goes_on_from_another_has_its_threads(many_threads: None, tmp_path: Path) -> None:
    run = make_data(str(tmp_path / "run"), settings=SHORT)
    assert train(run, asking(2)) == 2
    longer = extend(run, "expert.train.steps=16")
    assert train(longer, asking(1)) == 2


def test_attempts_before_threads_were_recorded_had_one(tmp_path: Path) -> None:
    run = make_data(str(tmp_path / "run"), settings=SHORT)
    assert threads_of_last_attempt([run], EXPERT) is None
    claim(run.store, EXPERT, {"world_size": 1})
    assert threads_of_last_attempt([run], EXPERT) == 1
    claim(run.store, EXPERT, {"threads": 3})
    assert threads_of_last_attempt([run], EXPERT) == 3
    for damaged in (0, -2, "many", 1.5, None, 10**9):
        claim(run.store, EXPERT, {"threads": damaged})
        assert threads_of_last_attempt([run], EXPERT) == 1


@pytest.mark.parametrize(("part", "threads"), [(0.5, 1), (1.5, 1), (2.5, 2)])
def test_a_network_has_no_more_threads_than_its_steps_are_worth(
    many_threads: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: float, threads: int
) -> None:
    """With two workers each has half of a step."""
    monkeypatch.setattr(claiming, "threads_for", int)
    run = make_data(str(tmp_path / "run"), "tiny", SHORT)
    job = train_job(run, EXPERT)
    monkeypatch.setattr(claiming, "FLOPS_PER_THREAD", int(job.training_flops(1) / 2 / part))
    placement = TrainPlacement(resources_per_worker={"CPU": 8}, workers={"min": 1, "max": 2})
    assert default_threads(placement, job) == threads
