"""Processes that write and commit are killed at random moments; whatever is there afterwards is whole."""

import random
import time
from itertools import count
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from ddm_ray.config import RunConfig
from ddm_ray.errors import CorruptArtifact
from ddm_ray.jobs.attempts import claim, claimed, heartbeat, saved_states
from ddm_ray.run.graph import evaluation, expert
from ddm_ray.run.info import StateInfo
from ddm_ray.run.manifest import sha256
from ddm_ray.run.run import Run
from ddm_ray.store.store import Store
from tests.conftest import wait_for
from tests.infos import commit_written, info_of
from tests.processes import forked
from tests.run.artifacts import save_state

pytestmark = pytest.mark.contract

NUM_KILLS = 20


def tagged(number: int, size: int) -> bytes:
    """Bytes that tell by themselves whether they are whole."""
    body = random.Random(number).randbytes(size)
    return sha256(body).encode() + body


def is_whole(content: bytes) -> bool:
    return sha256(content[64:]).encode() == content[:64]


def write_for_ever(url: str, began: Event) -> None:
    """What training and stages do to a run, in a loop: heartbeats, states, artifacts, replacements."""
    run = Run.open(url)
    attempt = claim(run.store, expert(0))
    began.set()
    for step in count(1):
        run.store.write("current", tagged(step, 6 << 20 if step % 5 == 0 else 50_000))
        attempt.beat({"step": step})
        files = {"model": tagged(step, 100_000), "optimizer": tagged(-step, 200_000)}
        save_state(attempt, step, run.identity(expert(0)), files, keep=2)
        artifact = evaluation(f"{attempt.number}-{step}")
        for name in ("grid.png", "metrics.json"):
            run.store.write(f"{artifact}/{name}", tagged(step, 30_000))
        commit_written(run, artifact, ["grid.png", "metrics.json"], info_of(artifact, num_samples=step))


def finished_evaluations(run: Run) -> int:
    """Number of finished evaluations, each read and verified."""
    number = 0
    for name in run.store.folders("eval"):
        manifest = run.finished(evaluation(name))
        for file in manifest.files if manifest else ():
            assert is_whole(run.read(evaluation(name), file))
        number += manifest is not None
    return number


def check(run: Run) -> None:
    assert is_whole(run.store.read("current"))
    for state in saved_states(run.store, expert(0)):
        assert not isinstance(state, CorruptArtifact), state
        assert StateInfo.of(state.manifest) == StateInfo(step=state.step, seconds=1.5, world_size=1)
        assert all(is_whole(run.store.read(f"{state.prefix}/{name}")) for name in ("model", "optimizer"))
    assert heartbeat(run.store, expert(0))
    for key in run.store.sizes("experts"):
        assert "#" not in key, "an unfinished file is listed"


def test_a_killed_writer_leaves_whole_objects_or_none(tmp_path: Path, config: RunConfig) -> None:
    run, chance = Run.create(str(tmp_path / "run"), config), random.Random(0)
    run.store.write("current", tagged(0, 10))
    processes = forked()
    for kill in range(1, NUM_KILLS + 1):
        began = processes.Event()
        writer = processes.Process(target=write_for_ever, args=(run.url, began), daemon=True)
        writer.start()
        assert began.wait(30)
        if kill % 2:  # in the middle of later writes too, on however slow a machine
            wait_for(lambda kill=kill: run.manifest(evaluation(f"{kill}-3")), 30)
        time.sleep(chance.uniform(0.0, 0.15))
        assert writer.is_alive(), "the writer ended by itself"
        writer.kill()
        writer.join()
        assert claimed(run.store, expert(0))[-1] == kill
        check(run)
    num_finished = finished_evaluations(run)
    assert num_finished > NUM_KILLS, "the writers were killed before they wrote anything"
    assert Store(run.url).create("current", b"") is False
    Store(run.url).write("current", tagged(1, 10))
    check(run)
