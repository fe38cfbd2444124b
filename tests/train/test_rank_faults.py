"""Worlds of ranks, without Ray, after a fault: the curve and the weights of an undisturbed run, nothing written twice.

To the bit where as many ranks trained, within 1e-5 otherwise.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ddm_ray.jobs.attempts import Attempt, claimed
from ddm_ray.run.manifest import NAME
from ddm_ray.run.run import Run
from tests.traced import DiskFault
from tests.train.background import Background
from tests.train.ranks import EXPERT
from tests.train.results import apart, final_weights, touched

pytestmark = pytest.mark.integration

SHORT = ["expert.train.steps=30", "expert.train.batch=6"]
HANG_SECONDS = 1.0
# What a watchdog may be late by on a machine that others use too.
LATE_SECONDS = 60.0
NUM_CALLS = 7


def met(what: str, rank: int, **then: Any) -> dict[str, Any]:
    """Two ranks, of which one gets a signal at step 12; and who trains afterwards."""
    usual = {"world": 2, "checkpoint_steps": 5} | ({"hang_seconds": HANG_SECONDS} if what == "SIGSTOP" else {})
    return {"settings": SHORT, "legs": [usual | {"fault": {"signal": what, "rank": rank, "step": 12}}, usual | then]}


CASES: dict[str, dict[str, Any]] = {
    "quiet-1": {"settings": SHORT, "legs": [{"world": 1}]},
    "quiet-2": {"settings": SHORT, "legs": [{"world": 2}]},
    "killed-0": met("SIGKILL", 0),
    "killed-1": met("SIGKILL", 1),
    "killed-1-then-1": met("SIGKILL", 1, world=1),
    "stopped-0": met("SIGSTOP", 0),
    "stopped-1-then-1": met("SIGSTOP", 1, world=1),
    # One that comes back when another has finished: an island that was cut off.
    "comes-back": {
        "settings": SHORT,
        "legs": [
            {"world": 1, "fault": {"signal": "SIGSTOP", "rank": 0, "step": 12, "waits": True}, "checkpoint_steps": 5},
            {"world": 1},
        ],
    },
    # A newer attempt that lives, without a state so far: all ranks end together, and the next world goes on.
    "overtaken": {
        "settings": SHORT,
        "legs": [
            # A milestone waits for the state before it: that of step 5 is there at step 12, however slow a disk is.
            {"world": 2, "fault": {"rival": True, "rank": 0, "step": 12}, "checkpoint_steps": 5, "milestone_steps": 5},
            {"world": 2, "checkpoint_steps": 5},
        ],
    },
    "rivals": {
        "settings": SHORT,
        "legs": [{"world": 1, "worlds": 2, "checkpoint_steps": 1, "milestone_steps": 2, "keep_states": 1}],
    },
}


@dataclass
class Worlds:
    """Runs of worlds by case, and what was seen of each leg."""

    folder: Path
    seen: dict[str, list[dict[str, Any]]]

    def run(self, name: str) -> Run:
        return Run.open(str(self.folder / name))


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    folder = tmp_path_factory.mktemp("worlds")
    ranks = Background("ranks", str(folder), json.dumps(CASES))
    try:
        yield Worlds(folder, json.loads(ranks.finish()))
    finally:
        ranks.kill()


@pytest.mark.parametrize("case", [name for name in CASES if name.startswith(("killed", "stopped"))])
def test_a_rank_is_lost_and_the_next_world_goes_on(worlds: Worlds, case: str) -> None:
    run, (first, second) = worlds.run(case), worlds.seen[case]
    what, lost, *_ = case.split("-")
    world = CASES[case]["legs"][1]["world"]
    expected_codes: list[int | None] = [1, 1]
    expected_codes[int(lost)] = -9 if what == "killed" else None
    assert first["codes"] == expected_codes
    assert second["codes"] == [0] * world
    attempt = Attempt(run.store, EXPERT, 1)
    note = attempt.failure()
    assert note and not note["final"] and note["kind"] == ("LostWorker" if what == "killed" else "Stuck")
    if what == "stopped":
        beat = json.loads(run.store.read(f"{attempt.prefix}/HEARTBEAT"))
        most = 3 / beat["steps_per_second"] + HANG_SECONDS
        assert HANG_SECONDS < first["outlived"] < most + LATE_SECONDS
        assert first["went_on"] == [1], "one that comes back alone ends"
    assert run.require(EXPERT).info["attempts"] == 2 and claimed(run.store, EXPERT) == [1, 2]
    difference = apart(worlds.run(f"quiet-{world}"), run, EXPERT)
    # 1e-5 would be that of an average with 0.99^30 of the first weights, which all worlds share, in it.
    assert difference == 0 if world == 2 else difference < 1e-5 / (1 - 0.99**30), difference
    assert touched(first["files"], second["files"], [1]) == []
    assert final_weights(run, EXPERT) == [f"attempts/0002/weights/step-{30:09d}/{NAME}"]


def test_attempts_name_the_versions_that_they_compute_with(worlds: Worlds) -> None:
    run = worlds.run("killed-1")
    claims = [Attempt(run.store, EXPERT, number).claim() for number in (1, 2)]
    assert claims[0]["versions"].keys() == {"ddm_ray", "python", "torch", "deepspeed", "ray"}
    beat = json.loads(run.store.read(f"{EXPERT}/attempts/0002/HEARTBEAT"))
    assert beat["versions"] == claims[1]["versions"] == claims[0]["versions"]


def test_one_that_comes_back_writes_below_its_own_attempt_alone(worlds: Worlds) -> None:
    run, (first, second) = worlds.run("comes-back"), worlds.seen["comes-back"]
    assert first["codes"] == [None] and second["codes"] == [0]
    assert first["went_on"] == [1], "it ended between two steps, long before the last"
    note = Attempt(run.store, EXPERT, 1).failure()
    assert note and (note["kind"], note["final"]) == ("Superseded", True)
    assert note["error"].startswith("attempt 1 ends after step 12: attempt 2 on host ")
    before, after = second["files"], second["files_at_last"]
    assert touched(before, after, [2]) == [] and before[NAME] == after[NAME]
    assert {path.split("/")[1] for path in after if before.get(path) != after[path]} <= {"0001"}
    assert run.require(EXPERT).info["attempts"] == 2
    assert apart(worlds.run("quiet-1"), run, EXPERT) == 0


def test_ranks_that_are_overtaken_end_together_and_save_nothing(worlds: Worlds) -> None:
    run, (first, second) = worlds.run("overtaken"), worlds.seen["overtaken"]
    assert (first["codes"], second["codes"]) == ([1, 1], [0, 0])
    note = Attempt(run.store, EXPERT, 1).failure()
    assert note and note["error"].startswith("attempt 1 ends after step 12: attempt 2 on host ")
    assert max(path for path in first["files"] if "0001/state/" in path and path.endswith(NAME)) <= (
        f"attempts/0001/state/step-{10:09d}/{NAME}"
    )
    assert claimed(run.store, EXPERT) == [1, 2, 3] and run.require(EXPERT).info["attempts"] == 3
    assert touched(first["files"], second["files"], [1]) == []
    assert apart(worlds.run("quiet-2"), run, EXPERT) == 0


def test_two_at_once_end_with_one_result(worlds: Worlds) -> None:
    """Each state that one commits takes states of the other's away, of which that wants to publish weights."""
    run, (seen,) = worlds.run("rivals"), worlds.seen["rivals"]
    assert claimed(run.store, EXPERT) == [1, 2]
    notes = [Attempt(run.store, EXPERT, number).failure() for number in (1, 2)]
    assert notes[1] is None and 0 in seen["codes"]
    assert notes[0] is None or not notes[0]["final"]
    assert apart(worlds.run("quiet-1"), run, EXPERT) == 0


@pytest.mark.parametrize(
    "fault", [DiskFault.KILL, pytest.param(DiskFault.FULL, marks=pytest.mark.chaos)], ids=lambda fault: fault.name
)
def test_a_fault_at_any_write_costs_time_alone(tmp_path: Path, fault: DiskFault, every: bool) -> None:
    cut = Background("cut_short", str(tmp_path), fault.name, "1000000" if every else str(NUM_CALLS))
    try:
        num_calls, *ends = map(int, cut.finish().split())
    finally:
        cut.kill()
    assert num_calls > 100 and len(ends) == (num_calls if every else NUM_CALLS)
    # The last ones may come too early or too late to be met: beats depend on time.
    assert set(ends) <= ({-9, 0} if fault is DiskFault.KILL else {0, 3})
    assert ends.count(-9 if fault is DiskFault.KILL else 3) > len(ends) // 2
