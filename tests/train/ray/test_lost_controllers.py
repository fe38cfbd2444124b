"""What drives a training is killed, one process after the other: the next one finds the places in the cluster free."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import ray

from ddm_ray.jobs.attempts import claimed
from ddm_ray.placement import TrainPlacement
from ddm_ray.run.graph import expert
from ddm_ray.run.run import Run
from ddm_ray.train.ray.leaving import has_room_for_one_more
from ddm_ray.train.ray.train_all import train_all
from tests.conftest import wait_for
from tests.processes import command
from tests.random_run import make_data
from tests.train.ray.site import curve_so_far

pytestmark = pytest.mark.chaos

SETTINGS = ("expert.train.steps=400", "expert.train.batch=6")


def controllers() -> list[int]:
    """Controllers of Ray Train on this machine."""
    processes = (int(folder.name) for folder in Path("/proc").glob("[0-9]*"))
    return [pid for pid in processes if command(pid).startswith("ray::TrainController")]


def drivers() -> list[int]:
    """Processes of this one that drive a training."""
    return [child.pid for child in multiprocessing.active_children() if child.pid]


def free_cpus() -> float:
    """CPUs of the connected Ray that nothing holds."""
    return float(ray.available_resources().get("CPU", 0.0))


def test_killed_controllers_and_drivers_leave_no_places(
    ray_cluster: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The workers take more than half of the cluster, so that the next ones wait for what the last ones held."""
    run = make_data(str(tmp_path / "run"), settings=SETTINGS)
    expected = make_data(str(tmp_path / "quiet"), settings=SETTINGS)
    placement = TrainPlacement(resources_per_worker={"CPU": 3}, checkpoint_steps=20)
    training = threading.Thread(target=train_all, args=(run, [expert(0)], placement), daemon=True)
    others = {*controllers(), *drivers()}
    training.start()
    for number, processes in enumerate((controllers, drivers, controllers), 1):
        kill_the_only(processes, others, run, number)
    training.join(300)
    assert not training.is_alive() and run.finished(expert(0))
    assert claimed(run.store, expert(0)) == [1, 2, 3, 4]
    wait_for(lambda: free_cpus() == 4, 30, lambda: f"{free_cpus()} CPUs are free")
    train_all(expected, [expert(0)], placement)
    ours, quiet = (curve_so_far(each, expert(0)) for each in (run, expected))
    assert ours.keys() == quiet.keys() and all(ours[name].equal(quiet[name]) for name in ours)
    assert capfd.readouterr().err.count("an attempt was lost: ") == 3


def kill_the_only(processes: Callable[[], list[int]], others: set[int], run: Run, attempt: int) -> None:
    """SIGKILL to the process that this finds beside the others, once the attempt has saved a state."""
    states = Path(run.url) / expert(0) / f"attempts/{attempt:04d}/state"
    wait_for(lambda: list(states.glob("*/_MANIFEST.json")), 180, lambda: f"{states} has no state")
    (pid,) = set(processes()) - others
    os.kill(pid, signal.SIGKILL)


def test_one_more_worker_has_room_where_a_node_has_all_that_it_asks_for(ray_cluster: str) -> None:
    wait_for(lambda: free_cpus() == 4, 30)
    assert has_room_for_one_more({"CPU": 4.0}) and not has_room_for_one_more({"CPU": 5.0})
    holder = ray.util.placement_group([{"CPU": 1.5}])
    ray.get(holder.ready())
    wait_for(lambda: free_cpus() == 2.5, 30)
    assert has_room_for_one_more({"CPU": 2.5}) and not has_room_for_one_more({"CPU": 3.0})
    assert not has_room_for_one_more({"CPU": 1.0, "slice-a": 1.0})
    ray.util.remove_placement_group(holder)
    wait_for(lambda: free_cpus() == 4, 30)
