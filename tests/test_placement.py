"""islands.yaml names islands and how each runs; every mistake in it is one line that names it."""

from pathlib import Path

import pytest

from ddm_ray.errors import ConfigError
from ddm_ray.placement import Placement, load_placement

ISLANDS = """
islands:
  laptop: {}
  lab:
    address: ray://10.0.0.5:10001
    workers: 4
    use_gpu: true
    resources_per_worker: {CPU: 2, GPU: 1, lab: 1}
    zero_stage: 2
    micro_batch: 16
    threads: 2
    checkpoint_steps: 1000
    max_failures: 0
"""


@pytest.fixture
def islands(tmp_path: Path) -> str:
    path = tmp_path / "islands.yaml"
    path.write_text(ISLANDS)
    return str(path)


def refusal(path: str | None, island: str | None) -> str:
    with pytest.raises(ConfigError) as failure:
        load_placement(path, island)
    message = str(failure.value)
    assert message.isprintable(), "more than one line"
    return message


def test_without_a_file_it_is_a_laptop() -> None:
    assert load_placement(None, None) == Placement()
    assert Placement().workers == 1
    assert not Placement().use_gpu
    assert Placement().address is None


def test_an_island_by_its_name(islands: str) -> None:
    assert load_placement(islands, "laptop") == Placement()
    lab = load_placement(islands, "lab")
    assert lab == Placement(
        address="ray://10.0.0.5:10001",
        workers=4,
        use_gpu=True,
        resources_per_worker={"CPU": 2.0, "GPU": 1.0, "lab": 1.0},
        zero_stage=2,
        micro_batch=16,
        threads=2,
        checkpoint_steps=1000,
        max_failures=0,
    )


def test_the_only_island_may_go_unnamed(tmp_path: Path) -> None:
    path = tmp_path / "one.yaml"
    path.write_text("islands: {lab: {workers: 3}}")
    assert load_placement(str(path), None) == load_placement(str(path), "lab") == Placement(workers=3)


def test_which_island_must_be_clear(islands: str) -> None:
    choose = "choose one with --island: laptop, lab"
    assert refusal(islands, None) == f"{islands}: names 2 islands; {choose}"
    assert refusal(islands, "moon") == f"{islands}: no island 'moon'; {choose}"
    assert refusal(None, "lab") == "--island lab: name the file it is in with --islands FILE"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.yaml")
    assert refusal(missing, None) == f"{missing}: No such file or directory"
    assert refusal(str(tmp_path), None) == f"{tmp_path}: Is a directory"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("islands: [", "not YAML"),
        ("\x89PNG", "not YAML"),
        ("", "got None"),
        ("lab: {workers: 1}", "islands: Field required"),
        ("islands: {}", "islands: Dictionary should have at least 1 item"),
        ("islands: {lab: }", "islands.lab: Input should be a valid dictionary"),
        ("islands: {lab: {wrokers: 1}}", "islands.lab.wrokers: unknown key"),
        ("islands: {lab: {workers: 0}}", "islands.lab.workers: Input should be greater than 0, got 0"),
        ("islands: {lab: {workers: two}}", "islands.lab.workers: Input should be a valid integer"),
        ("islands: {lab: {zero_stage: 4}}", "islands.lab.zero_stage: Input should be 0"),
        ("islands: {lab: {micro_batch: 0}}", "islands.lab.micro_batch: Input should be greater than 0"),
        (
            "islands: {lab: {max_failures: -1}}",
            "islands.lab.max_failures: Input should be greater than or equal",
        ),
        (
            "islands: {lab: {resources_per_worker: {GPU: 0}}}",
            "islands.lab: resources_per_worker.GPU must be above 0",
        ),
        (
            "islands: {lab: {resources_per_worker: {CPU: .nan}}}",
            "resources_per_worker.CPU: Input should be a finite",
        ),
        ("islands: {lab: {}}\nhead: x", "head: unknown key"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, content: str, told: str) -> None:
    path = tmp_path / "islands.yaml"
    path.write_bytes(content.encode("latin-1"))
    message = refusal(str(path), None)
    assert message.startswith(f"{path}: ")
    assert told in message
