"""Several trainings by one command: as many at once as have room, each failure its own, what waits for others last."""

import re
import time
from pathlib import Path

import pytest
import ray
from click.testing import CliRunner
from ray.util import placement_group, remove_placement_group

from ddm_ray.cli import main
from ddm_ray.errors import GaveUp, MissingArtifact, TrainingError
from ddm_ray.jobs.attempts import claim, claimed
from ddm_ray.jobs.job_files import JobFiles, list_jobs
from ddm_ray.jobs.launches import Launch
from ddm_ray.jobs.status import Status
from ddm_ray.placement import TrainPlacement
from ddm_ray.run.graph import MONOLITH, ROUTER, STUDENT, expert
from ddm_ray.run.run import Run
from ddm_ray.train.ray import train_all as launching
from ddm_ray.train.ray.room import has_room
from ddm_ray.train.ray.train_all import TrainingsFailed, train_all
from tests.jobs.attempts import beat
from tests.random_run import make_run

pytestmark = pytest.mark.integration

SETTINGS = ("expert.train.steps=20", "router.train.learning_rate=1e30", "student.teacher=full")
ISLAND = "islands: {wide: {resources_per_worker: {CPU: 3}, checkpoint_steps: 10}}"


@pytest.fixture
def half_trained(tmp_path: Path) -> Run:
    """A run that lacks expert 1 and its router, which can't be trained."""
    run = make_run(str(tmp_path / "run"), settings=SETTINGS, num_rows=60)
    for artifact in (expert(1), ROUTER):
        run.store.delete(artifact)
    (tmp_path / "islands.yaml").write_text(ISLAND)
    return run


def test_all_are_trained_in_turn_and_a_failure_ends_no_other(
    half_trained: Run, ray_cluster: str, tmp_path: Path
) -> None:
    """Of the Ray's four CPUs one takes three. The student is never begun, for what teaches it failed."""
    run = half_trained
    where = ("--islands", str(tmp_path / "islands.yaml"), "--address", ray_cluster)
    done = CliRunner().invoke(main, ["train", run.url, "all", "--student", "--monolith", *where])
    assert done.exit_code == 1
    finished = [line.partition(": finished already, ")[0] for line in done.stdout.splitlines() if "already" in line]
    assert finished == ["experts/000", "monolith"]
    assert "1 of 3 trainings at a time: one asks for 1 x (3 CPU), Ray has 4 CPU" in done.stderr
    first, second, third = done.stderr.splitlines()[-3:]
    assert re.match(r"router: loss \S+ with gradient norm \S+ at step \d+; begin a run with a lower", first)
    assert second.startswith("student: ") and "has no finished router yet; make it with: ddm train" in second
    assert third == "error: 2 of 3 trainings failed: router, student"
    assert run.finished(expert(1)) and claimed(run.store, expert(1)) == [1]
    assert claimed(run.store, ROUTER) == [1] and claimed(run.store, STUDENT) == []
    assert "Traceback" not in done.output


def test_what_an_older_command_left_is_not_shown_as_what_became_of_this_one(ray_cluster: str, tmp_path: Path) -> None:
    run = make_run(str(tmp_path / "run"), settings=("expert.train.steps=20",), num_rows=60)
    run.store.delete(expert(1))
    beat(claim(run.store, expert(1)), 3, 20)
    seen: list[Status] = []
    train_all(run, [expert(1)], TrainPlacement(checkpoint_steps=10), watch=seen.extend)
    assert run.finished(expert(1))
    assert seen and {each.job.attempt for each in seen if each.job} <= {2}


def test_a_job_that_has_its_place_is_not_said_to_wait_for_one(
    ray_cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """However long its worker takes to begin."""
    run, placement = make_run(str(tmp_path / "run"), num_rows=60), TrainPlacement(resources_per_worker={"CPU": 1.25})
    monkeypatch.setattr(launching, "WARN_SECONDS", -1.0)
    files = list_jobs(run.store, [expert(1)])

    def warning(began: float = -launching.START_SECONDS) -> str:
        job = launching._Job(run, Launch(expert(1)), placement, files[expert(1)], noted=True)
        job._began = began
        job.warn_if_it_waits({expert(1): JobFiles(expert(1), {})})
        return capsys.readouterr().err

    assert "experts/001: no worker has begun yet; there is room for it, " in warning()
    assert not warning(time.monotonic()), "its resources are free: it is starting"
    free = placement_group([{"CPU": ray.available_resources()["CPU"]}])
    assert free.wait(30)
    assert "experts/001: no worker has begun yet; it asks for 1 x (1.25 CPU), free are " in warning(time.monotonic())
    remove_placement_group(free)
    group = placement_group([placement.asked])
    assert group.wait(30) and not warning()
    remove_placement_group(group)


def test_what_is_finished_is_named_and_needs_no_ray(tmp_path: Path) -> None:
    run = make_run(str(tmp_path / "run"), num_rows=60)
    done = CliRunner().invoke(main, ["train", run.url, "all", "--monolith", "--address", "127.0.0.1:1"])
    assert done.exit_code == 0
    *finished, following = done.stdout.splitlines()
    names = [line.partition(": finished already, ")[0] for line in finished]
    assert names == ["experts/000", "experts/001", "router", "monolith"]
    assert following == f"next: ddm sample {run.url}"


def test_nothing_to_train_on_is_told_before_ray_starts(tmp_path: Path) -> None:
    assert CliRunner().invoke(main, ["init", str(tmp_path / "run"), "--recipe", "tiny"]).exit_code == 0
    done = CliRunner().invoke(main, ["train", str(tmp_path / "run"), "all"])
    assert done.exit_code == 1
    assert "has no finished partition/shards/cluster=000 yet; begin with: ddm prepare" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("all", "1"), "train all: takes no INDEX"),
        (("router", "--monolith"), "--monolith is for all: train router trains that alone; leave it out"),
    ],
)
def test_mistakes_of_all_are_named(tmp_path: Path, arguments: tuple[str, ...], expected: str) -> None:
    assert CliRunner().invoke(main, ["init", str(tmp_path / "run"), "--recipe", "tiny"]).exit_code == 0
    done = CliRunner().invoke(main, ["train", str(tmp_path / "run"), *arguments])
    assert (done.exit_code, done.stderr) == (1, f"error: {expected}\n")


def test_room_is_what_the_running_ones_leave() -> None:
    one = TrainPlacement(resources_per_worker={"CPU": 1, "memory": 4e9})
    many = TrainPlacement(workers={"min": 2, "max": 9}, resources_per_worker={"CPU": 0.5})  # type: ignore[arg-type]
    machine = {"CPU": 2.0, "memory": 9e9}
    assert has_room(one, [one], machine) and not has_room(one, [one, one], machine), "CPUs"
    assert not has_room(one, [one], {**machine, "memory": 7e9}), "memory"
    assert has_room(many, [one], machine) and not has_room(many, [one, many], machine), "its least workers"
    assert has_room(one, [], {"CPU": 0.5}), "alone it is waited for, or refused by itself"
    third = TrainPlacement(resources_per_worker={"CPU": 0.33})
    assert has_room(third, [third] * 5, machine) and not has_room(third, [third] * 6, machine)


def test_several_failures_pass_if_each_does() -> None:
    gone, final = GaveUp("lost workers"), TrainingError("diverged")
    assert (
        TrainingsFailed({MONOLITH: gone}, 3).passes and not TrainingsFailed({MONOLITH: gone, ROUTER: final}, 3).passes
    )
    both = TrainingsFailed({ROUTER: MissingArtifact("none"), MONOLITH: final}, 4)
    assert str(both) == "2 of 4 trainings failed: router, monolith"
