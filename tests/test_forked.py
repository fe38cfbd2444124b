"""Workers of the tests' Rays: forks of one process a node, which end as a raylet's own children would."""

import os
import signal

import pytest
import ray

from tests.conftest import wait_for
from tests.processes import command, state_of

pytestmark = pytest.mark.integration


@ray.remote(num_cpus=0)
class Worker:
    def facts(self) -> tuple[int, int, str]:
        """Its process, that one's parent, and a name of its environment."""
        return os.getpid(), os.getppid(), os.environ.get("MINE", "")


def test_a_worker_is_a_fork_with_an_environment_of_its_own(ray_cluster: str) -> None:
    facts = [ray.get(Worker.options(runtime_env={"env_vars": {"MINE": mine}}).remote().facts.remote()) for mine in "ab"]
    assert [mine for _, _, mine in facts] == ["a", "b"]
    assert len({pid for pid, _, _ in facts}) == 2
    assert all("tests/forked/workers.py" in command(parent) for _, parent, _ in facts)


def test_a_worker_that_hangs_is_ended_by_its_raylet(ray_cluster: str) -> None:
    worker = Worker.remote()
    pid, _, _ = ray.get(worker.facts.remote())
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: state_of(pid) == "T", 60)
    ray.kill(worker)
    wait_for(lambda: not command(pid), 60, lambda: f"{pid} is {state_of(pid)}")
