"""The judge of an island's answer: one case a fault, nothing said that isn't certain, and no trust in the answer."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddm_ray.config import load_recipe
from ddm_ray.errors import RayAway, RayError
from ddm_ray.islands.check import clock_bounds
from ddm_ray.islands.faults import Answer, Fault, faults, sound
from ddm_ray.islands.jobs import SubmittedJob
from ddm_ray.islands.needs import ModelNeeds, needs_of
from ddm_ray.islands.probe import MOST_REPORT, ProbeReport, look, places_of
from ddm_ray.placement import Island, TrainPlacement, Workers
from ddm_ray.storage.graph import ROUTER, STUDENT, expert
from ddm_ray.storage.run import Run
from ddm_ray.train.ray.room import grows

HERE = {"ddm_ray": "0.1.0", "python": "3.11.4", "torch": "2.12.0+cu130", "ray": "2.60.0"}
H100 = {"name": "NVIDIA H100 80GB HBM3", "memory": 85e9}
NODE = {
    "name": "n1",
    "versions": HERE | {"torch": "2.12.0+cpu", "python": "3.11.9", "more": "1"},
    "memory": 2e12,
    "gpus": [H100] * 8,
    "cache": "/cache",
    "room": 1e12,
    "places": 8,
}
CLUSTER = {"resources": {"CPU": 64, "GPU": 8, "memory": 1e12}, "places": 8, "nodes": [NODE], "open": False}
REPORT = {"cluster": CLUSTER, "clock": [0, 1], "creates_once": True}
EIGHT = Island(name="north", train=TrainPlacement(workers=Workers(min=8, max=8), use_gpu=True))
JOB = SubmittedJob("x", "SUCCEEDED", exit_code=0)


@pytest.fixture(scope="module")
def needs(tmp_path_factory: pytest.TempPathFactory) -> list[ModelNeeds]:
    """Of an expert of 3 billion parameters, whose rows are 400 GB, and of the router."""
    run = Run.create(str(tmp_path_factory.mktemp("needs") / "run"), load_recipe("ddm-24b"))
    expert_needs, router_needs = needs_of(run, [expert(0), ROUTER])
    return [replace_rows(expert_needs), router_needs]


def replace_rows(need: ModelNeeds) -> ModelNeeds:
    from dataclasses import replace

    return replace(need, rows={expert(0): 400 * 10**9})


def report(node: Mapping[str, Any] = {}, cluster: Mapping[str, Any] = {}, **fields: Any) -> ProbeReport:
    """The report of a sound island of eight H100, with fields changed."""
    nodes = {"nodes": [NODE | node]}
    read = ProbeReport.from_json(json.dumps(REPORT | {"cluster": CLUSTER | nodes | cluster} | fields))
    assert read is not None
    return read


def answer(of: ProbeReport | None = None, **fields: Any) -> Answer:
    return Answer(**{"reached": True, "job": JOB, "report": of, "stored": True, "ahead": (-0.5, 0.5)} | fields)


def names(judged: Answer, island: Island, needs: list[ModelNeeds]) -> list[str]:
    return [fault.name for fault in faults(judged, island, needs, HERE)]


def test_a_sound_island_in_words(needs: list[ModelNeeds]) -> None:
    judged = answer(report())
    assert faults(judged, EIGHT, needs, HERE) == []
    assert sound(judged, EIGHT) == (
        "ok: 8 places for workers, 64 CPUs, 8 GPUs (NVIDIA H100 80GB HBM3), 2,000 GB of memory, room for 1,000 GB in"
        " the cache, Ray 2.60.0, clock within 0.5 s"
    )


HEAD = NODE | {"gpus": [], "memory": 4e9, "room": 1e9, "places": 0}


def test_what_an_island_will_grow_to_is_unknown(needs: list[ModelNeeds]) -> None:
    """Its head is no measure of machines that come when they are asked for; those that are there are judged."""
    growing = {"resources": {}, "places": 0, "nodes": [HEAD], "grows": True}
    judged = answer(report(cluster=growing))
    assert faults(judged, EIGHT, needs, HERE) == []
    assert sound(judged, EIGHT).startswith("unknown: has machines for 0 of 8 workers so far: ")
    assert names(answer(report(cluster=growing | {"grows": False})), EIGHT, needs) == ["too few GPUs", "too few CPUs"]
    small = growing | {"resources": {"GPU": 4}, "places": 4, "nodes": [HEAD, NODE | {"places": 4, "room": 1e9}]}
    assert names(answer(report(cluster=small)), EIGHT, needs) == ["cache disk full"]
    assert sound(answer(report(cluster={"grows": True})), EIGHT).startswith("ok: 8 places"), "it has grown"


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([({"memory": 1e9}, {})], True),
        ([({"CPU": 4.0}, {})], False),
        ([({"CPU": 4.0}, {"ray.io/node-group": "head"})], True),
        ([({"memory": 1e9}, {}), ({"GPU": 1.0}, {})], False),
    ],
)
def test_a_cluster_whose_machines_come_when_asked_for(nodes: list[tuple[Any, Any]], expected: bool) -> None:
    assert grows([{"Resources": resources, "Labels": labels} for resources, labels in nodes]) is expected


def test_a_cache_that_cannot_be_used_is_the_machines_own_fault(tmp_path: Path) -> None:
    """Not that of a machine that gives no answer."""
    (tmp_path / "file").write_text("")
    for cache, why in ((tmp_path / "file" / "x", "Not a directory: "), (tmp_path / ("c" * 300), "File name too long")):
        seen = look("memory:///", "0", str(cache), False)
        assert seen.room is None and seen.no_room.startswith(why) and seen.cache == str(cache)
    assert (seen := look("memory:///", "0", str(tmp_path / "new"), False)).room and not seen.no_room


@pytest.mark.parametrize(
    ("changed", "name", "words"),
    [
        ({"cluster": {"open": True}}, "open to others", "its Ray answers who gives no token"),
        ({"trouble": {"kind": "no key", "text": "no key: set"}}, "no key", "no key: set"),
        ({"trouble": {"kind": "elsewhere", "text": "/x has nothing"}}, "storage not shared", "/x has nothing; put"),
        ({"trouble": {"kind": "away", "text": "timed out"}}, "storage away", "timed out; open the way"),
        ({"trouble": {"kind": "refused", "text": "no space"}}, "storage refuses", "no space"),
        ({"node": {"trouble": {"kind": "no key", "text": "denied"}}}, "no key", "n1: denied; start its Ray"),
        ({"creates_once": False}, "no conditional writes", "ignores If-None-Match there"),
        ({"node": {"ahead": [-100, -61]}}, "clock off", "n1: its clock is 60 s behind"),
        ({"node": {"versions": HERE | {"torch": "2.11.0"}}}, "other versions", "n1 has torch 2.11.0, here 2.12.0+cu1"),
        ({"node": {"versions": HERE | {"python": "3.12.4"}}}, "other versions", "n1 has python 3.12.4, here 3.11.4"),
        ({"node": {"versions": {**HERE, "ddm_ray": "0.2"}}}, "other versions", "n1 has ddm-ray 0.2, here 0.1.0"),
        ({"node": {"versions": {}}}, "other versions", "n1 has ddm-ray none, here 0.1.0; python none"),
        ({"cluster": {"resources": {"CPU": 64, "GPU": 4}, "places": 4}}, "too few GPUs", "8 x 1 GPU asked for, its R"),
        ({"cluster": {"resources": {"CPU": 4, "GPU": 8}, "places": 4}}, "too few CPUs", "8 x 1 CPU asked for, its Ra"),
        ({"cluster": {"places": 4}}, "too little room", "8 workers of 1 GPU and 1 CPU asked for, its nodes have room"),
        (
            {"node": {"gpus": [H100] * 7}},
            "too few GPUs",
            "n1: Ray counts 8 for workers, torch sees 7; install a d",
        ),
        ({"node": {"gpus": [H100, H100 | {"memory": 16e9}] * 4}}, "too little memory", "n1: a NVIDIA H100 80GB HBM3 h"),
        ({"node": {"memory": 40e9}}, "too little memory", "n1 has 40.0 GB, the state of one expert takes 4"),
        ({"node": {"room": 3e11}}, "cache disk full", "n1: /cache has room for 300 GB, the rows of one expert are 400"),
        (
            {"node": {"room": None, "no_room": "Permission denied"}},
            "cache refuses",
            "n1: /cache: Permission denied; let",
        ),
        ({"node": {"no_encoder": "a/b isn't in"}}, "no text encoder", "n1: a/b isn't in; let it reach the hub"),
        ({"cluster": {"silent": ["n2: no answer"]}}, "a silent machine", "n2: no answer; end its Ray"),
        ({"cluster": {"nodes": []}}, "no report", "the probe names no machine"),
    ],
)
def test_each_fault_of_a_report_has_its_name(
    needs: list[ModelNeeds], changed: dict[str, Any], name: str, words: str
) -> None:
    (fault,) = faults(answer(report(**changed)), EIGHT, needs, HERE)
    assert fault.name == name and str(fault).startswith(f"{name}: ") and words in str(fault)


FAILED = SubmittedJob("x", "FAILED", "Job failed:\nsh: 1: ddm: not found", 127)


@pytest.mark.parametrize(
    ("fields", "name", "words"),
    [
        ({"reached": False, "refused": RayAway("island north: http://x can't be reached")}, "API unreachable", "http:"),
        ({"refused": RayAway("island north: http://x takes no job yet")}, "takes no job", "http://x takes no job yet"),
        ({"refused": RayError("island north: http://x is no Jobs API")}, "no Jobs API", "http://x is no Jobs API"),
        ({"odd": "answers 302: to log in", "report": report()}, "an odd answer", "it answers 302: to log in; see what"),
        ({"job": FAILED}, "no ddm", "sh: 1: ddm: not found; install"),
        ({"job": FAILED, "log": ["sh: ddm: nowhere"]}, "no ddm", "sh: ddm: nowhere; install"),
        ({"job": SubmittedJob("x", "FAILED", "Error: No such command", 2)}, "other versions", "No such command; inst"),
        ({"job": SubmittedJob("x", "FAILED", "", 1), "log": ["error: no Ray"]}, "no report", "FAILED: error: no Ray"),
        ({"job": SubmittedJob("x", "SUCCEEDED", "", 0)}, "no report", "the probe SUCCEEDED: nothing printed"),
        ({"job": SubmittedJob("x", "PENDING"), "late": True}, "takes no job", "the probe hasn't begun in time"),
        ({"job": SubmittedJob("x", "RUNNING"), "late": True, "log": ["y"]}, "takes too long", "end in time: y; look"),
    ],
)
def test_each_fault_of_a_job_has_its_name(fields: dict[str, Any], name: str, words: str) -> None:
    (fault,) = faults(answer(**fields), EIGHT, [], HERE)
    assert fault.name == name and words in str(fault) and "island north" not in str(fault)


def test_a_report_that_comes_back_by_the_log_alone_is_of_another_storage() -> None:
    assert names(answer(report(), stored=False), EIGHT, []) == ["storage not shared"]
    lost = report(trouble={"kind": "no key", "text": "denied"}, creates_once=None)
    assert names(answer(lost, stored=False), EIGHT, []) == ["no key"], "and not another one for what follows from it"


def test_memory_is_that_of_the_workers_that_there_would_be(needs: list[ModelNeeds]) -> None:
    """On CPUs all of a machine's share one memory; with more workers each has less of the state."""
    on_cpus = {"workers": Workers(min=1, max=4), "zero_stage": 3}
    island = Island(train=TrainPlacement(**on_cpus))
    (large, *_) = needs
    for places, workers in ((1, 1), (3, 3), (9, 4)):
        taken = workers * (large.memory(workers, use_gpu=False)[3] or 0)
        for memory, expected in ((1.01 * taken, []), (0.99 * taken, ["too little memory"])):
            of = report({"memory": memory, "places": places}, {"places": places})
            assert names(answer(of), island, needs) == expected


@pytest.mark.parametrize(("teachers", "expected"), [(None, ["too little memory"]), (2, [])])
def test_a_students_teachers_take_memory_of_each_worker(tmp_path: Path, teachers: Any, expected: list[str]) -> None:
    run = Run.create(str(tmp_path / "run"), load_recipe("ddm-24b"))
    needs = needs_of(run, [STUDENT])
    island = Island(train=EIGHT.train.model_copy(update={"teachers": teachers}))
    gpu = {"name": "small", "memory": 1.01 * (needs[0].memory(8, True, 2)[1] or 0)}
    judged = faults(answer(report({"gpus": [gpu] * 8})), island, needs, HERE)
    assert [fault.name for fault in judged] == expected
    assert all("fewer teachers" in fault.remedy for fault in judged)


@given(offset=st.floats(-1e4, 1e4), waits=st.lists(st.floats(0, 30), min_size=5, max_size=5))
def test_bounds_of_a_clock_have_its_offset_in_them(offset: float, waits: list[float]) -> None:
    """Whatever the time that each step takes: a look that sees nothing, a reading, the note, a reading, a look."""
    unseen, before, noted, after, seen = (sum(waits[: number + 1]) for number in range(5))
    assert unseen <= before <= noted <= after <= seen
    low, high = clock_bounds((before + offset, after + offset), (unseen, seen))
    assert low - 1e-6 <= offset <= high + 1e-6
    assert high - low <= (after - before) + (seen - unseen) + 1e-6
    # A reading may come before the last look that sees nothing.
    low, high = clock_bounds((unseen + offset, after + offset), (before, seen))
    assert low - 1e-6 <= offset <= high + 1e-6


@pytest.mark.parametrize(
    ("ahead", "expected"),
    [
        ((-0.1, 0.2), []),
        ((59.0, 61.0), []),
        ((-5.0, 300.0), []),
        ((-300.0, -59.0), []),
        ((60.1, 61.0), ["its clock is 60 s ahead of the one here"]),
        ((-90.0, -88.6), ["its clock is 89 s behind the one here"]),
    ],
)
def test_a_clock_is_off_where_that_is_certain(ahead: tuple[float, float], expected: list[str]) -> None:
    assert [fault.what for fault in faults(answer(report(), ahead=ahead), EIGHT, [], HERE)] == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "null",
        "[" * 100_000,
        json.dumps(REPORT | {"clock": ["NaN", 0]}),
        json.dumps(REPORT | {"clock": [float("nan"), 0]}),
        json.dumps(REPORT | {"trouble": {"kind": "novel", "text": ""}}),
        json.dumps(REPORT | {"cluster": CLUSTER | {"nodes": [NODE] * 101}}),
        json.dumps(REPORT | {"cluster": CLUSTER | {"nodes": [NODE | {"name": "n" * 1001}]}}),
        json.dumps(REPORT) + " " * MOST_REPORT,
    ],
)
def test_what_is_no_report_is_taken_for_none(text: str) -> None:
    assert ProbeReport.from_json(text) is None


def test_a_report_survives_its_own_line() -> None:
    odd = report({"name": 'ü\x1b[31m"\\ \u2028 日本', "cache": "/a  b\tc"})
    line = odd.to_json()
    assert line.isascii() and line.isprintable()
    assert ProbeReport.from_json(line) == odd


def test_places_are_whole_workers() -> None:
    assert places_of({"CPU": 4.0, "GPU": 2.0}, {"CPU": 1.0, "GPU": 1.0}) == 2
    assert places_of({"CPU": 0.3}, {"CPU": 0.1}) == 3
    assert places_of({"CPU": 4.0}, {"island-a": 1.0}) == 0


def test_a_fault_is_a_line() -> None:
    assert str(Fault("no key", "denied", "give one")) == "no key: denied; give one"
