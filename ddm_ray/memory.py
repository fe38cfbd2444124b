"""Memory that this process has, and could still have, in bytes."""

import os
from contextlib import suppress
from pathlib import Path

GROUPS = "/proc/self/cgroup"
# Where control groups are, of which controller, their limit, what counts against it, and which of that the kernel takes
# back when it is short.
LIMITS = (
    ("/sys/fs/cgroup", "", "memory.max", "memory.current", "inactive_file"),
    ("/sys/fs/cgroup/memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def free_bytes() -> float:
    """What is free on this machine or, if less, left of what this container or batch job may use."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        free = 1024 * _table(meminfo)["MemAvailable"]
    else:
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    groups = [(group, names) for root, kind, *names in LIMITS for group in _groups(Path(root), kind)]
    return min([free, *(left for group, names in groups if (left := _left(group, *names)) is not None)])


def ranks_here() -> int:
    """How many ranks of this world share this machine's memory."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def taken_bytes(name: str) -> int:
    """A size of this process as Linux names it: VmRSS, VmHWM (its most), VmData. OSError on other systems."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def forget_most() -> None:
    """Let VmHWM begin at VmRSS, where the system can."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _groups(root: Path, kind: str) -> list[Path]:
    """The folders of this process's control group and of all that it is in; the outermost alone if it isn't told."""
    path = ""
    if Path(GROUPS).exists():
        lines = (line.split(":", 2) for line in Path(GROUPS).read_text().splitlines())
        path = next((path for _, kinds, path in lines if kind in kinds.split(",")), "")
    inner = root / path.strip("/")
    return [inner, *(folder for folder in inner.parents if folder.is_relative_to(root))]


def _left(group: Path, limit: str, used: str, reclaimable: str) -> int | None:
    """What is left to a control group; None where there is none, or no limit."""
    if not (group / limit).exists() or not (most := (group / limit).read_text().strip()).isdigit():
        return None
    return max(0, int(most) - int((group / used).read_text()) + _table(group / "memory.stat")[reclaimable])


def _table(path: Path) -> dict[str, int]:
    """Names and the whole numbers that follow them."""
    lines = (line.replace(":", " ").split() for line in path.read_text().splitlines())
    return {name: int(value) for name, value, *_ in lines}
