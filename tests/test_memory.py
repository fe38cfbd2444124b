"""What is left of memory, in a container too."""

import os
from pathlib import Path

import pytest

from ddm_ray import memory

MACHINE = memory.free_bytes()
LIMITED = {"limit": "3000\n", "used": "2500\n", "memory.stat": "anon 900\ninactive_file 700\n"}


def free_in(monkeypatch: pytest.MonkeyPatch, folder: Path, files: dict[str, str], inside: str = "/") -> float:
    """With a control group in `folder`, this process in `inside` of it."""
    folder.mkdir(exist_ok=True, parents=True)
    for name, content in files.items():
        (folder / name).write_text(content)
    (folder / "cgroup").write_text(f"3:cpu,cpuacct:/other\n2:memory:{inside}\n0::/\n")
    monkeypatch.setattr(memory, "GROUPS", str(folder / "cgroup"))
    monkeypatch.setattr(memory, "LIMITS", ((str(folder), "memory", "limit", "used", "inactive_file"),))
    return memory.free_bytes()


@pytest.mark.parametrize(
    ("changed", "left"), [({}, 1200), ({"used": "9000"}, 0), ({"memory.stat": "inactive_file 0"}, 500)]
)
@pytest.mark.parametrize("inside", ["/", "/job/step", "/../elsewhere"])
def test_what_is_left_to_a_container(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changed: dict[str, str], left: int, inside: str
) -> None:
    """Its limit, less what counts against it but for pages that the kernel takes back."""
    assert free_in(monkeypatch, tmp_path, LIMITED | changed, inside) == left


def test_the_tightest_of_nested_groups_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A batch job's step has no limit, the job 500 left, the machine 1200."""
    free_in(monkeypatch, tmp_path / "job" / "step", LIMITED | {"limit": "max"})
    free_in(monkeypatch, tmp_path / "job", LIMITED | {"memory.stat": "inactive_file 0"})
    assert free_in(monkeypatch, tmp_path, LIMITED, "/job/step") == 500
    assert free_in(monkeypatch, tmp_path, LIMITED, "/another") == 1200


def test_all_of_a_containers_memory_is_its_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever of it is in use, and no more than the machine has."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit, expected in (("10000", 10_000), ("max", machine), ("9223372036854771712", machine)):
        free_in(monkeypatch, tmp_path, LIMITED | {"limit": limit, "used": "9000"})
        assert memory.total_bytes() == expected


@pytest.mark.contract
@pytest.mark.parametrize("limit", ["max", "9223372036854771712"])
def test_without_a_limit_it_is_the_machines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: str) -> None:
    assert free_in(monkeypatch, tmp_path, LIMITED | {"limit": limit}) == pytest.approx(MACHINE, rel=0.5)
    assert free_in(monkeypatch, tmp_path / "none", {}) > 2**20


def test_the_most_that_was_taken_is_forgotten() -> None:
    before = memory.taken_bytes("VmRSS")
    held = b"x" * 2**28
    del held
    assert memory.taken_bytes("VmHWM") > before + 2**27
    memory.reset_peak()
    assert memory.taken_bytes("VmHWM") < before + 2**27
