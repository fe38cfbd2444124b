"""The day's script for a GPU goes through all of its phases without one, and says what went wrong."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.chaos


def lines_of(gpu: ModuleType, folder: Path) -> list[str]:
    return str(gpu.table(folder / gpu.RESULTS)).splitlines()[2:]


def test_every_phase_goes_through(world_of_one: None, tmp_path: Path, benchmark: Callable[[str], ModuleType]) -> None:
    gpu = benchmark("gpu")
    for phases in gpu.PARTS.values():
        for phase in phases:
            gpu.phase_of(phase)(gpu.Asked(phase, "cpu", True, tmp_path))
    lines = lines_of(gpu, tmp_path)
    assert not [line for line in lines if "Error" in line or line.endswith(" no |")]
    assert {line.split(" | ")[0].lstrip("| ") for line in lines} == {
        phase for phases in gpu.PARTS.values() for phase in phases
    }
    assert sum("losses of the engine from a CPU's" in line and line.endswith(" yes |") for line in lines) == 7


def test_a_phase_that_fails_costs_itself_alone(
    tmp_path: Path, benchmark: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = benchmark("gpu")
    monkeypatch.setitem(gpu.PARTS, "large", {"unknown": 60, "facts": 60})
    gpu.run("large", gpu.Asked("", "cpu", True, tmp_path), 120.0)
    lines = lines_of(gpu, tmp_path)
    assert any(
        line.startswith("| unknown | ended | exit status 1: AttributeError: ") and line.endswith(" | >= 0 | no |")
        for line in lines
    )
    assert any(line.startswith("| facts | torch | 2.") for line in lines)
    gpu.run("large", gpu.Asked("", "cpu", True, tmp_path), 1.0)
    assert lines_of(gpu, tmp_path)[-1] == "| facts | left out | no time is left  |  |  |"
