"""`ddm train` on a Ray cluster of several nodes: after each fault the curve and the weights are an undisturbed run's.

To the bit where as many workers trained, and nothing was written twice.
"""

import json
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ddm_ray.jobs.attempts import Attempt
from ddm_ray.run.manifest import NAME
from ddm_ray.run.run import Run
from tests.conftest import wait_for
from tests.faults import Fault, Training, inject
from tests.processes import command
from tests.train.ray.site import ENDLESS, Site, curve_so_far
from tests.train.results import Files, apart, difference, final_weights, stored, touched, until

pytestmark = pytest.mark.integration


@pytest.fixture
def chance() -> random.Random:
    """Another seed each time, which a failing test shows."""
    seed = int(os.environ.get("DDM_FAULT_SEED", time.time_ns() % 10**6))
    print(f"DDM_FAULT_SEED={seed}")
    return random.Random(seed)


@contextmanager
def launched(site: Site, *trainings: Training) -> Iterator[None]:
    """All are begun; none is left that a test failed over, and what has finished ends beside the next test."""
    try:
        for training in trainings:
            training.launch()
        yield
    except BaseException:
        for training in trainings:
            training.stop()
        raise
    site.leaving.extend(trainings)


@pytest.mark.chaos
def test_an_elastic_job_shrinks_grows_and_leaves_as_nodes_go_and_come(site: Site, chance: random.Random) -> None:
    """What it does at each step is what one does that nothing happens to; sums are in another order.

    The first test of a cluster: for 180 s after a driver is killed, Ray keeps what it had reserved from elastic jobs.
    """
    # At a low rate: a fast machine does many thousand steps, over which roundings of sums would grow.
    settings = (*ENDLESS, "expert.train.learning_rate=1.0e-5")
    training = site.training("elastic", 1, "elastic", 2, settings)

    def trainers() -> list[int]:
        return [len(node.trainers()) for node in training.nodes]

    with launched(site, training):
        training.wait_for_state()
        assert trainers() == [1, 1]
        attempt, saved = training.place()[0], training.states()[-1].name
        training.nodes.pop(chance.randrange(2)).kill()
        training.wait_for_step((attempt, 0))
        shrunk = training.place()[0]
        assert (training.beat()["world_size"], trainers()) == (1, [1])
        assert f"step-{training.beat()['first']:09d}" >= saved

        training.add_node()
        training.wait_for_step((shrunk, 0))
        grown = training.place()[0]
        assert (training.beat()["world_size"], trainers()) == (2, [1, 1])
        assert (grown, training.lost_steps(shrunk)) == (shrunk + 1, 0)

        leaving = training.nodes.pop(chance.randrange(2))
        training.cluster.drain(leaving, seconds=60)
        training.wait_for_step((grown, 0))
        last, step = training.place()
        assert (training.beat()["world_size"], trainers()) == (1, [1])
        assert (last, training.lost_steps(grown)) == (grown + 1, 0)
        wait_for(lambda: len(curve_so_far(training.run, training.artifact)["loss"]) > step, 200, training.log_tail)
        training.stop()
    leaving.kill()
    case = {"quiet": {"settings": settings, "legs": [{"world": 1, "seconds": 10**6, "checkpoint_steps": 100}]}}
    (site.folder / "elastic-quiet").mkdir()
    quiet = site.begin("ranks", str(site.folder / "elastic-quiet"), json.dumps(case))
    mine = curve_so_far(training.run, training.artifact)
    url = site.folder / "elastic-quiet/quiet"
    wait_for((url / "experts").exists, 200)
    run = Run.open(str(url))
    wait_for(lambda: len(curve_so_far(run, training.artifact)["loss"]) >= step, 600, every=1.0)
    quiet.kill()
    other = curve_so_far(run, training.artifact)
    assert len(mine["loss"]) > step
    # Another batch would be off by tenths.
    assert 0 < difference(*(until(step, one) for one in (mine, other))) < 1e-4


@pytest.mark.chaos
def test_a_worker_is_lost_then_one_freezes_then_the_driver_is_lost(site: Site, chance: random.Random) -> None:
    training = site.training("pair", 1, "pair", 2)
    seen: Files = {}
    with launched(site, training):
        for number, fault in enumerate((Fault.WORKER_KILLED, Fault.WORKER_STOPPED, Fault.DRIVER_KILLED), 1):
            training.wait_for_state(number)
            assert len(training.workers()) == 2
            inject(fault, training, chance)
            training.wait_for_step((number, 0))
            before, seen = seen, stored(training.run, training.artifact)
            assert touched(before, seen, range(1, number)) == []
        training.wait_until_finished()
    assert training.attempts() == [1, 2, 3, 4]
    assert touched(seen, stored(training.run, training.artifact), [1, 2, 3]) == []
    assert apart(site.undisturbed("long-2"), training.run, training.artifact) == 0
    assert len(final_weights(training.run, training.artifact)) == 1


@pytest.mark.chaos
def test_an_expert_is_launched_twice_at_once(site: Site) -> None:
    """From two islands: both commands end well, and what the later one finds finished is as it was."""
    training = site.training("twice", 1, "patient")
    site.cluster.slice("slice-b", 1)

    def islands() -> set[str | None]:
        return {Attempt(training.run.store, training.artifact, n).claim().get("island") for n in training.attempts()}

    with launched(site, training):
        training.wait_for_step((0, 0))
        (first,) = training.workers()
        # However fast the machine is, it hasn't finished before the other begins.
        os.kill(first, signal.SIGSTOP)
        training.launch_elsewhere("b")
        wait_for(lambda: islands() == {"patient", "b"}, 120, training.log_tail)
        os.kill(first, signal.SIGCONT)
        training.wait_until_finished()
        manifest = f"{training.artifact}/{NAME}"
        committed = training.run.store.read(manifest)
        training.wait_for_drivers()
    assert training.run.store.read(manifest) == committed
    assert len(training.attempts()) > 1
    assert apart(site.undisturbed("long"), training.run, training.artifact) == 0


@pytest.mark.chaos
def test_one_expert_is_killed_whole_and_the_other_notices_nothing(site: Site, chance: random.Random) -> None:
    """At a random step of its; then it moves to the other's slice, where it waits for its place."""
    quiet, killed = site.training("two", 1, "a"), site.training("two", 0, "b")
    with launched(site, quiet, killed):
        step = chance.randrange(1, 200)
        wait_for(lambda: killed.place()[1] >= step, 200, killed.log_tail)
        killed.stop()
        for node in killed.nodes:
            node.kill()
        killed.drivers.clear()
        killed.launch("a")
        for training in (quiet, killed):
            training.wait_until_finished()
    assert quiet.attempts() == [1], "not even another try"
    assert killed.attempts() == [1, 2]
    for training in (quiet, killed):
        assert apart(site.undisturbed("long"), training.run, training.artifact) == 0
        assert len(final_weights(training.run, training.artifact)) == 1


@pytest.mark.chaos
def test_the_head_is_lost_and_storage_alone_remains(site: Site) -> None:
    """What was cut off freezes, and comes back when another Ray cluster has finished its work."""
    lost = site.training("head", 1, "a")
    with launched(site, lost):
        lost.wait_for_state()
        worker = lost.beat()["pid"]
        os.kill(worker, signal.SIGSTOP)  # first, and before it has finished
        assert not lost.finished()
        frozen = lost.nodes[0].pids()
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        site.see_off()
        site.cluster.nodes[0].kill()
        lost.stop()
        number = lost.attempts()[-1]
    again = site.training("head", 1, "a")
    with launched(site, again):
        again.wait_until_finished()
    wait_for(lambda: not command(again.beat()["pid"]), 120)  # it beats once more after its last commit
    seen = stored(again.run, again.artifact)
    for pid in frozen:
        os.kill(pid, signal.SIGCONT)
    wait_for(lambda: not command(worker), 120)
    after = stored(again.run, again.artifact)
    assert seen[NAME] == after[NAME] and touched(seen, after, [number + 1]) == []
    assert again.run.require(again.artifact).info["attempts"] == number + 1
    assert apart(site.undisturbed("long"), again.run, again.artifact) == 0


@pytest.mark.chaos
def test_an_owner_that_was_frozen_ends_once_it_wakes(site: Site) -> None:
    """Another island has taken over meanwhile, and its command says which; that one trains on."""
    training = site.training("frozen", 1, "a", steps=ENDLESS)
    site.cluster.slice("slice-b", 1)
    with launched(site, training):
        training.wait_for_state(1)
        training.overtake("b")
        assert training.drivers[0].wait(120) == 1, training.log_tail()
        line = r"error: experts/001: .*attempt \d+ on island b, host .*, job \w+ has overtaken .* \(exit code 1: "
        assert re.search(line, training.log_tail())
        place = training.place()
        wait_for(lambda: training.place() > place, 60, training.log_tail)
        assert training.drivers[1].poll() is None
        training.stop()
    assert training.attempts()[:2] == [1, 2]
