"""islands.yaml names islands and how each runs; every mistake in it is one line that names it."""

import math
from pathlib import Path

import pytest
import yaml

from ddm_ray.errors import ConfigError
from ddm_ray.placement import (
    ISLAND_FIELDS,
    Island,
    PreparePlacement,
    TrainPlacement,
    Workers,
    load_island,
    load_islands,
)
from ddm_ray.submitted import submitted_job
from tests.conftest import ROOT

ISLANDS = """
islands:
  laptop: {}
  lab:
    address: ray://10.0.0.5:10001
    jobs: https://10.0.0.5:8265/
    token_file: ~/.ddm/lab
    price_per_hour: 12.5
    embedders: 3
    workers: {min: 2, max: 4}
    use_gpu: true
    resources_per_worker: {CPU: 2.5, GPU: 0.5, lab: 1}
    zero_stage: 2
    checkpoint_steps: 1000
    hang_seconds: 0.5
"""


@pytest.fixture
def islands(tmp_path: Path) -> str:
    path = tmp_path / "islands.yaml"
    path.write_text(ISLANDS)
    return str(path)


def refusal(path: str | None, island: str | None) -> str:
    with pytest.raises(ConfigError) as failure:
        load_island(path, island)
    message = str(failure.value)
    assert message.isprintable(), "more than one line"
    return message


def test_without_a_file_it_is_a_laptop() -> None:
    laptop = load_island(None, None)
    assert laptop == Island(train=TrainPlacement(), prepare=PreparePlacement())
    assert (laptop.address, laptop.token_file) == (None, None)
    assert laptop.train.workers == Workers(min=1, max=1)
    assert not laptop.train.use_gpu and not laptop.prepare.use_gpu


def test_an_island_by_its_name(islands: str) -> None:
    assert load_island(islands, "laptop") == Island(name="laptop")
    lab = load_island(islands, "lab")
    where = (lab.name, lab.address, lab.jobs, lab.token_file, lab.price_per_hour)
    assert where == ("lab", "ray://10.0.0.5:10001", "https://10.0.0.5:8265", "~/.ddm/lab", 12.5)
    assert lab.prepare == PreparePlacement(use_gpu=True, embedders=3)
    assert lab.train.slices == ("lab",)
    assert lab.train == TrainPlacement(
        workers=Workers(min=2, max=4),
        use_gpu=True,
        resources_per_worker={"CPU": 2.5, "GPU": 0.5, "lab": 1.0},
        zero_stage=2,
        checkpoint_steps=1000,
        hang_seconds=0.5,
    )


def test_states_are_saved_by_minutes_whatever_steps_say() -> None:
    both = {"checkpoint_minutes": 60.0, "checkpoint_steps": 1000}
    asked = ({}, both, {"checkpoint_minutes": 60.0}, {"checkpoint_steps": 1000}, {"checkpoint_minutes": 0})
    minutes = [TrainPlacement.model_validate(each).minutes_between_states for each in asked]
    assert minutes == [5.0, 60.0, 60.0, 5.0, math.inf]


def test_the_only_island_may_go_unnamed(tmp_path: Path) -> None:
    path = tmp_path / "one.yaml"
    path.write_text("islands: {lab: {workers: 3}}")
    lab = Island(name="lab", train=TrainPlacement(workers=Workers(min=3, max=3)))
    assert load_island(str(path), None) == load_island(str(path), "lab") == lab


def test_the_number_of_workers_is_one_or_a_range() -> None:
    fixed, elastic = (TrainPlacement.model_validate({"workers": given}).workers for given in (3, {"min": 2, "max": 5}))
    assert (fixed.min, fixed.max, fixed.elastic) == (3, 3, False)
    assert (elastic.min, elastic.max, elastic.elastic) == (2, 5, True)
    placement = TrainPlacement(workers=elastic)
    assert TrainPlacement.model_validate(placement.model_dump()) == placement
    assert TrainPlacement.model_validate_json(placement.model_dump_json()) == placement


@pytest.mark.parametrize(
    ("job", "own", "given", "joined"),
    [
        (None, "a:6379", None, ("b:6379", "b.token")),
        (None, "a:6379", "c:6379", ("c:6379", "b.token")),
        ('{"metadata": {"job_submission_id": "raysubmit_7"}}', "a:6379", None, ("a:6379", None)),
        ('{"metadata": {"job_submission_id": "raysubmit_7"}}', "a:6379", "c:6379", ("c:6379", "b.token")),
        ("[]", "a:6379", None, ("a:6379", None)),
    ],
)
def test_a_submitted_job_joins_the_cluster_that_it_was_submitted_to(
    monkeypatch: pytest.MonkeyPatch, job: str | None, own: str | None, given: str | None, joined: tuple[str, str | None]
) -> None:
    for name, value in (("RAY_JOB_CONFIG_JSON_ENV_VAR", job), ("RAY_ADDRESS", own)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert Island(name="b", address="b:6379", token_file="b.token").ray(given) == joined
    assert submitted_job() == (None if job is None else "raysubmit_7" if "raysubmit_7" in job else "")


@pytest.mark.parametrize("path", sorted((ROOT / "cluster_configs").rglob("islands.yaml")), ids=str)
def test_files_that_come_along(path: Path) -> None:
    islands = yaml.safe_load(path.read_text())["islands"]
    assert [load_island(str(path), name).name for name in islands] == list(islands)


def test_which_island_must_be_clear(islands: str) -> None:
    choose = "choose one of laptop, lab (island)"
    assert refusal(islands, None) == f"{islands}: names 2 islands; {choose}"
    assert refusal(islands, "moon") == f"{islands}: no island 'moon'; {choose}"
    assert refusal(None, "lab") == "island lab: in which file; name it (islands=FILE)"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.yaml")
    assert refusal(missing, None) == f"{missing}: No such file or directory"
    assert refusal(str(tmp_path), None) == f"{tmp_path}: Is a directory"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("islands: [", "not YAML"),
        ("", "got None"),
        ("islands: {}", "islands: Dictionary should have at least 1 item"),
        ("islands: {lab: }", "islands.lab: Input should be a valid dictionary"),
        ("islands: {lab: {wrokers: 1}}", "islands.lab.wrokers: unknown key"),
        ("islands: {lab: {workers: 0}}", "islands.lab.workers: must be 1 or more, got 0"),
        ("islands: {lab: {workers: two}}", "islands.lab.workers: is a whole number, or {min: 1, max: 4}, got 'two'"),
        ("islands: {lab: {workers: {min: 3, max: 2}}}", "islands.lab.workers: max 2 is below min 3"),
        ("islands: {lab: {workers: {min: 2}}}", "islands.lab.workers.max: Field required"),
        ("islands: {lab: {zero_stage: 4}}", "islands.lab.zero_stage: Input should be 0, 1, 2 or 3"),
        (
            "islands: {lab: {resources_per_worker: {island-a: 0.5}}}",
            "resources_per_worker.island-a must be a whole number, got 0.5: workers on a slice are counted",
        ),
        ("islands: {lab: {teachers: 1}}", "islands.lab.teachers: Input should be greater than or equal to 2"),
        ("islands: {lab: {micro_batch: true}}", "micro_batch: Input should be a valid integer, got True"),
        (
            "islands: {lab: {use_gpu: true, resources_per_worker: {GPU: 0}}}",
            "islands.lab: resources_per_worker.GPU must be above 0",
        ),
        (
            "islands: {lab: {resources_per_worker: {CPU: .nan}}}",
            "resources_per_worker.CPU: Input should be a finite",
        ),
        ("islands: {lab: {resources_per_worker: {}}}", "islands.lab: resources_per_worker is empty"),
        (
            "islands: {lab: {compile: true, zero_stage: 3}}",
            "islands.lab: compile doesn't go with zero_stage 3: choose zero_stage 1 or 2, or compile: false",
        ),
        ("islands: {lab: {resources_per_worker: {CPU: 1, GPU: 1}}}", "asks for GPU; set use_gpu: true too"),
        (
            "islands: {lab: {address: 'http://head:8265'}}",
            "islands.lab.address: is a cluster's own address, as HEAD:6379; http://head:8265 goes into jobs",
        ),
        *(
            (f"islands: {{lab: {{jobs: '{url}'}}}}", f"islands.lab.jobs: is a URL, as http://HEAD:8265, got '{url}'")
            for url in ("head:6379", "http://", "http://head:many", "ray://head:10001", "")
        ),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, content: str, expected: str) -> None:
    path = tmp_path / "islands.yaml"
    path.write_bytes(content.encode("latin-1"))
    message = refusal(str(path), None)
    assert message.startswith(f"{path}: ")
    assert expected in message


def test_the_table_of_fields_is_that_of_the_code() -> None:
    text = (ROOT / "docs/reference/configuration.md").read_text().partition("\n## An island\n")[2].partition("\n## ")[0]
    for name, field in ISLAND_FIELDS.items():
        (line,) = (line for line in text.splitlines() if line.startswith(f"| `{name}` | "))
        assert line.endswith(f" | {field.description} |")


def test_a_job_is_told_how_it_trains_and_not_how_to_reach_its_island(islands: str) -> None:
    lab = load_islands(islands)["lab"]
    text = lab.to_json()
    for secret in ("10.0.0.5", ".ddm"):
        assert secret not in text
    here = Island.from_json("lab", text)
    where = {"address": None, "jobs": None, "token_file": None}
    assert here == lab.model_copy(update=where)
    assert (load_islands(islands)["laptop"].to_json(), Island.from_json("a", "{}")) == ("{}", Island(name="a"))


@pytest.mark.parametrize("text", ["", "[]", '{"zero_stag": 1}', '{"workers": 0}', '{"threads": 1' + " " * 20_000 + "}"])
def test_a_placement_that_is_none_is_one_line(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^placement of island north: .") as failure:
        Island.from_json("north", text)
    assert str(failure.value).isprintable()
