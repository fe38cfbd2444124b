"""What is left of memory, in a container too."""

from pathlib import Path

import pytest

from ddm_ray import memory

MACHINE = memory.free_bytes()
LIMITED = {"limit": "3000\n", "used": "2500\n", "memory.stat": "anon 900\ninactive_file 700\n"}


def free_in(monkeypatch: pytest.MonkeyPatch, folder: Path, files: dict[str, str]) -> float:
    for name, content in files.items():
        (folder / name).write_text(content)
    monkeypatch.setattr(memory, "CONTAINERS", ((str(folder), "limit", "used", "inactive_file"),))
    return memory.free_bytes()


@pytest.mark.parametrize(
    ("changed", "left"), [({}, 1200), ({"used": "9000"}, 0), ({"memory.stat": "inactive_file 0"}, 500)]
)
def test_what_is_left_to_a_container(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changed: dict[str, str], left: int
) -> None:
    """Its limit, less what counts against it but for pages that the kernel takes back."""
    assert free_in(monkeypatch, tmp_path, LIMITED | changed) == left


@pytest.mark.parametrize("limit", ["max", "9223372036854771712"])
def test_without_a_limit_it_is_the_machines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: str) -> None:
    assert free_in(monkeypatch, tmp_path, LIMITED | {"limit": limit}) == pytest.approx(MACHINE, rel=0.5)
    assert free_in(monkeypatch, tmp_path / "none", {}) > 2**20
