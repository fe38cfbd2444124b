"""Training on a Ray cluster of several nodes, in two slices: what is lost, what goes on, what is refused."""

import json
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ddm_ray.errors import CorruptArtifact
from ddm_ray.storage.attempts import heartbeat
from ddm_ray.storage.run import Run, expert
from tests.conftest import BIN, end, free_island, wait_for
from tests.random_run import make_data
from tests.train.nodes import Node, Nodes, ray_nodes

CHECKPOINT = 100

ISLANDS = f"""
islands:
  a: {{workers: {{min: 1, max: 2}}, resources_per_worker: {{CPU: 1, island-a: 1}}, checkpoint_steps: {CHECKPOINT}}}
  b: {{resources_per_worker: {{CPU: 1, island-b: 1}}, checkpoint_steps: {CHECKPOINT}}}
  c: {{resources_per_worker: {{CPU: 1, island-c: 1}}}}
  wide: {{resources_per_worker: {{CPU: 2, island-a: 1}}}}
"""
A, B = {"CPU": 1, "island-a": 1}, {"CPU": 1, "island-b": 1}
LONG = ("expert.train.steps=10000000", "expert.train.global_batch=6")


@dataclass
class Slices:
    """The cluster, its nodes by slice, a run without end, and the file that names the slices."""

    cluster: Nodes
    a: list[Node]
    b: Node
    run: Run
    islands: Path

    def train(self, index: int, island: str) -> subprocess.Popen[bytes]:
        """`ddm train` of an expert on a slice; what it says goes to the file `said`."""
        command = [str(BIN / "ddm"), "train", self.run.url, "expert", str(index), "--address", self.cluster.address]
        command += ["--islands", str(self.islands), "--island", island]
        with self.said(index).open("wb") as sink:
            return subprocess.Popen(command, stdout=sink, stderr=sink)

    def said(self, index: int) -> Path:
        """What the last `ddm train` of an expert printed."""
        return self.islands.parent / f"expert-{index}.txt"

    def progress(self, index: int) -> tuple[int, int]:
        """The newest attempt that did a step, and its last known step; (0, 0) if there is none."""
        try:
            beat = heartbeat(self.run.store, expert(index)) or {}
        except CorruptArtifact:
            beat = {}
        return (beat["attempt"], beat["step"]) if beat.get("phase") == "training" else (0, 0)

    def wait_for_attempt(self, index: int, attempt: int) -> int:
        """Wait until this attempt does steps; the first known."""
        wait_for(lambda: self.progress(index)[0] >= attempt, 120, self.said(index).read_text)
        number, step = self.progress(index)
        assert number == attempt
        return step

    def lost(self, index: int, attempt: int) -> int:
        """Steps that an attempt told of and saved no state after."""
        folder = f"{expert(index)}/attempts/{attempt:04d}"
        states = self.run.store.folders(f"{folder}/state")
        told = json.loads(self.run.store.read(f"{folder}/HEARTBEAT"))["step"]
        return max(0, told - int(states[-1].removeprefix("step-")))


@pytest.fixture(scope="module")
def slices(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slices]:
    """A head, two nodes of slice a and one of slice b."""
    folder = tmp_path_factory.mktemp("slices")
    (folder / "islands.yaml").write_text(ISLANDS)
    run = make_data(str(folder / "run"), settings=LONG)
    with ray_nodes(20000 + 100 * free_island(), folder / "log") as cluster:
        yield Slices(cluster, [cluster.add(A), cluster.add(A)], cluster.add(B), run, folder / "islands.yaml")


@pytest.fixture(scope="module")
def training(slices: Slices) -> Iterator[Slices]:
    """An expert on each slice, on all of its nodes."""
    jobs = [slices.train(0, "a"), slices.train(1, "b")]
    try:
        for index in (0, 1):
            slices.wait_for_attempt(index, 1)
        assert [len(node.trainers()) for node in (*slices.a, slices.b)] == [1, 1, 1]
        yield slices
    finally:
        for job in jobs:
            end(job)


def test_a_slice_that_no_node_is_of_is_refused(slices: Slices) -> None:
    assert slices.train(0, "c").wait(60) == 1
    assert slices.said(0).read_text().splitlines()[-1] == (
        "error: placement asks for island-c, which no node of the Ray cluster has (it has island-a, island-b);"
        " start its nodes with --resources '{\"island-c\": 1}', or change resources_per_worker in islands.yaml"
    )


def test_workers_too_wide_for_any_node_are_told_of(slices: Slices) -> None:
    """The nodes have 3 CPUs together, but none has 2: a larger one is waited for."""
    waiting = slices.train(0, "wide")
    wait_for(lambda: "waiting for nodes" in slices.said(0).read_text(), 60)
    end(waiting)
    assert (
        "warning: placement asks for 1 workers of 2 CPU and 1 island-a, the nodes have room for 0; waiting for nodes."
        " If none will come: Ctrl-C, and change islands.yaml\n" in slices.said(0).read_text()
    )


def test_the_end_of_a_slice_leaves_the_other_alone(training: Slices) -> None:
    attempt, step = training.progress(0)
    stopped = training.progress(1)
    training.b.kill()
    time.sleep(10)
    assert training.progress(0)[0] == attempt
    assert training.progress(0)[1] > step
    assert training.progress(1)[0] == stopped[0]


def test_a_job_goes_on_with_fewer_workers_and_grows_again(training: Slices) -> None:
    attempt, step = training.progress(0)
    training.a.pop().kill()
    assert training.wait_for_attempt(0, attempt + 1) > step - CHECKPOINT
    assert len(training.a[0].trainers()) == 1

    training.a.append(training.cluster.add(A))
    training.wait_for_attempt(0, attempt + 2)
    assert [len(node.trainers()) for node in training.a] == [1, 1]
    assert training.lost(0, attempt + 1) == 0


def test_a_node_that_is_to_be_taken_away_is_left_without_loss(training: Slices) -> None:
    attempt, _ = training.progress(0)
    training.cluster.drain(training.a.pop(), seconds=60)
    training.wait_for_attempt(0, attempt + 1)
    assert len(training.a[0].trainers()) == 1
    assert training.lost(0, attempt) == 0
