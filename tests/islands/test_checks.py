"""The list of checks: each fault of a machine is one line with the remedy, and a sound machine is told of nothing."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddm_ray.config import load_recipe
from ddm_ray.islands import checks
from ddm_ray.islands.checks import CHECKS, Machine, check
from ddm_ray.islands.needs import ModelNeeds, needs_of
from ddm_ray.models.hub import encoders_in_training
from ddm_ray.placement import TrainPlacement, Workers
from ddm_ray.run.graph import ROUTER, STUDENT, expert
from ddm_ray.run.run import Run
from ddm_ray.store.store import Store
from ddm_ray.train.ray.room import grows
from tests.islands.test_encoders_needed import begun, encoder

HERE = {"ddm_ray": "0.1.0", "python": "3.11.4", "torch": "2.12.0+cu130", "ray": "2.60.0"}
__all__ = ["encoder"]
H100 = ("NVIDIA H100 80GB HBM3", 85e9)
NAMES = [each.__name__ for each in CHECKS]
EIGHT = TrainPlacement(workers=Workers(min=8, max=8), use_gpu=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run.create(str(tmp_path_factory.mktemp("needs") / "run"), load_recipe("ddm-24b"))


@pytest.fixture(scope="module")
def needs(run: Run) -> list[ModelNeeds]:
    """Of an expert of 3 billion parameters, whose rows are 400 GB, and of the router."""
    of_expert, of_router = needs_of(run, [expert(0), ROUTER])
    return [replace(of_expert, rows={expert(0): 400 * 10**9}), of_router]


@pytest.fixture
def machine(run: Run, needs: list[ModelNeeds], monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A sound machine of eight H100."""
    monkeypatch.setattr(checks, "installed_versions", lambda: HERE)
    monkeypatch.setattr(checks, "total_bytes", lambda: 2e12)
    monkeypatch.setattr(checks, "_gpus", lambda: [H100] * 8)
    return Machine(run.url, EIGHT, needs, workers=8, here=8, expected=HERE | {"python": "3.11.9"})


def wrong(machine: Machine) -> dict[str, str]:
    answers = check(machine)
    assert [*answers] == NAMES and all(answer.isprintable() for answer in answers.values())
    return {name: answer for name, answer in answers.items() if answer}


def test_a_sound_machine_is_told_of_nothing_and_nothing_is_left(machine: Machine) -> None:
    before = sorted(Path(machine.run_url).rglob("*"))
    assert wrong(machine) == {}
    assert sorted(Path(machine.run_url).rglob("*")) == before


@pytest.mark.parametrize(
    ("changed", "name", "words"),
    [
        ({"note": "_probe-1/note"}, "storage", "/run is another storage here than where this was asked; put the"),
        ({"expected": {"torch": "2.11.0"}}, "versions", "torch is 2.12.0+cu130, where this was asked 2.11.0; install"),
        ({"expected": {"python": "3.12.4"}}, "versions", "python is 3.11.4, where this was asked 3.12.4; install"),
        ({"expected": {"ddm_ray": "0.2"}}, "versions", "ddm-ray is 0.1.0, where this was asked 0.2; install"),
        ({"expected": {"deepspeed": "1"}}, "versions", "deepspeed is missing, where this was asked 1; install"),
        ({"gpus": [H100] * 7}, "gpus", "8 are to train here, PyTorch sees 7; install a driver"),
        ({"gpus": [H100, ("old", 16e9)] * 4}, "memory", "a old has 16 GB, its part of one expert takes "),
        ({"bytes": 40e9}, "memory", "there are 40 GB, the state of one expert takes 4"),
        ({"encoders": ["/no/folder"]}, "encoders", "/no/folder is no folder of this machine; let this machine"),
    ],
)
def test_each_fault_is_a_line(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], name: str, words: str
) -> None:
    if gpus := changed.pop("gpus", None):
        monkeypatch.setattr(checks, "_gpus", lambda: gpus)
    if size := changed.pop("bytes", None):
        monkeypatch.setattr(checks, "total_bytes", lambda: size)
    ((check_name, answer),) = wrong(replace(machine, **changed)).items()
    assert check_name == name and words in answer


def test_a_machine_that_is_to_train_nothing_is_not_judged_by_what_that_takes(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the head of a cluster whose machines come when they are asked for."""
    monkeypatch.setattr(checks, "total_bytes", lambda: 4e9)
    monkeypatch.setattr(checks, "_gpus", list)
    assert wrong(replace(machine, here=0)) == {}


def test_the_same_storage_is_known_by_its_note(machine: Machine) -> None:
    store = Store(machine.run_url)
    store.write("_probe-2/note", b"")
    assert wrong(replace(machine, note="_probe-2/note")) == {}
    store.delete("_probe-2")


@pytest.mark.parametrize("mode", ["token", "disabled"])
def test_a_ray_that_asks_for_no_token_is_told_of(machine: Machine, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    assert (checks.token(replace(machine, in_ray=True)) == "") is (mode == "token")
    assert checks.token(machine) == ""


def test_a_cache_without_room_or_right(machine: Machine, needs: list[ModelNeeds], tmp_path: Path) -> None:
    def cache(folder: Path, rows: int = 1) -> str:
        of_expert = replace(needs[0], rows={expert(0): rows})
        placement = EIGHT.model_copy(update={"cache": str(folder)})
        return checks.cache(replace(machine, run_url="memory:///", placement=placement, needs=[of_expert]))

    (tmp_path / "file").write_text("")
    (tmp_path / "copies").mkdir()
    (tmp_path / "copies/rows").write_bytes(bytes(1000))
    assert cache(tmp_path / "new") == ""
    assert "is no folder that this user may write to; let it, or name another" in cache(tmp_path / "file/x")
    assert "File name too long; mend that, or name another folder as cache" in cache(tmp_path / ("c" * 300))
    assert f"{tmp_path}/copies has room for " in cache(tmp_path / "copies", 10**18)
    assert "the rows of one expert are 1e+03 PB; make room, or name" in cache(tmp_path / "copies", 10**18)


def test_memory_is_that_of_the_workers_that_there_would_be(
    machine: Machine, needs: list[ModelNeeds], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CPUs all of a machine's share one memory; with more workers each has less of the state."""
    placement = TrainPlacement(workers=Workers(min=1, max=4), zero_stage=3)
    for workers in (1, 3, 4):
        asked = replace(machine, placement=placement, workers=workers, here=workers)
        taken = workers * (needs[0].memory(workers, use_gpu=False)[3] or 0)
        for share, expected in ((1.01, []), (0.99, ["memory"])):
            monkeypatch.setattr(checks, "total_bytes", lambda size=share * taken: size)
            assert [*wrong(asked)] == expected


@pytest.mark.parametrize(("teachers", "expected"), [(None, ["memory"]), (2, [])])
def test_a_students_teachers_take_memory_of_each_worker(
    machine: Machine, run: Run, monkeypatch: pytest.MonkeyPatch, teachers: Any, expected: list[str]
) -> None:
    needs = needs_of(run, [STUDENT])
    size = 1.01 * (needs[0].memory(8, True, 2)[1] or 0)
    monkeypatch.setattr(checks, "_gpus", lambda: [("small", size)] * 8)
    answers = wrong(replace(machine, needs=needs, placement=EIGHT.model_copy(update={"teachers": teachers})))
    assert [*answers] == expected and all("fewer teachers" in answer for answer in answers.values())


def test_a_machine_says_which_encoder_it_cannot_have(
    tmp_path: Path, encoder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    for folder, names, stored, expected in (
        ("has", (encoder, "null"), "ids", ""),
        ("lacks", ("a/clip", "null"), "ids", "a/clip isn't in this machine's cache, and "),
        ("lacks-folder", ("/nowhere/clip", "null"), "ids", "/nowhere/clip is no folder of this"),
        ("lacks-pooled", (encoder, f"/{'c' * 300}"), "ids", "/ccc"),
        ("needs-none", ("a/clip", "null"), "features", ""),
    ):
        config = begun(tmp_path / folder, names[0], stored, names[1]).config
        answer = checks.encoders(Machine("", TrainPlacement(), encoders=encoders_in_training(config)))
        assert answer.startswith(expected) and bool(answer) is bool(expected)


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
