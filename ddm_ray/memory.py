"""Memory that this process has, and could still have, in bytes."""

import os
from pathlib import Path

# A container's limit, what counts against it, and which of that the kernel takes back when it is short.
CONTAINERS = (
    ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def free_bytes() -> float:
    """What is free on this machine or, if less, what is left of all that this container may use."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        free = 1024 * _table(meminfo)["MemAvailable"]
    else:
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([free, *(left for names in CONTAINERS if (left := _left(*names)) is not None)])


def taken_bytes(name: str) -> int:
    """A size of this process as Linux names it: VmRSS, VmHWM (since exec), VmData. OSError on other systems."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def _left(folder: str, limit: str, used: str, reclaimable: str) -> int | None:
    """What is left to a container; None where there is none, or no limit."""
    base = Path(folder)
    if not (base / limit).exists() or not (most := (base / limit).read_text().strip()).isdigit():
        return None
    return max(0, int(most) - int((base / used).read_text()) + _table(base / "memory.stat")[reclaimable])


def _table(path: Path) -> dict[str, int]:
    """Names and the whole numbers that follow them."""
    lines = (line.replace(":", " ").split() for line in path.read_text().splitlines())
    return {name: int(value) for name, value, *_ in lines}
