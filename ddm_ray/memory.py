"""Memory that this process uses, and memory that is still free, in bytes."""

import os
import re
from contextlib import suppress
from pathlib import Path

KEEP_FREED_MEMORY = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
"""Environment in which glibc reuses freed memory for the next batch or step instead of returning it to the system.

Otherwise the system maps it again, page by page. That took a fifth of the CPU time where a small network embeds many
rows, and half of a training step where a large network sees few.
"""

# Ray's memory monitor says so: `Memory on the node (IP: ..., ID: ...) was 21.85GB used / 23.00GB limit (0.95)`.
_FULL = re.compile(r"Memory on the node [^)]*\) was ([\d.]+)GB used / ([\d.]+)GB")
GROUPS = "/proc/self/cgroup"
# cgroup v2 and v1: mount point, controller, and the names of limit, usage and reclaimable page cache.
LIMITS = (
    ("/sys/fs/cgroup", "", "memory.max", "memory.current", "inactive_file"),
    ("/sys/fs/cgroup/memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def free_bytes() -> float:
    """Free memory of this machine or, if that is less, of this container or batch job."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        free = 1024 * _table(meminfo)["MemAvailable"]
    else:
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    groups = [(group, names) for root, kind, *names in LIMITS for group in control_groups(Path(root), kind)]
    return min([free, *(left for group, names in groups if (left := _left(group, *names)) is not None)])


def total_bytes() -> float:
    """Memory of this machine, used or free, or the limit of this container or batch job if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [group / limit for root, kind, limit, *_ in LIMITS for group in control_groups(Path(root), kind)]
    texts = [limit.read_text().strip() for limit in limits if limit.exists()]
    return min([total, *(int(text) for text in texts if text.isdigit())])


def taken_bytes(name: str) -> int:
    """A memory size of this process by its name on Linux: VmRSS, VmHWM (the peak of VmRSS), VmData.

    Raises OSError on other systems.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def reset_peak() -> None:
    """Set VmHWM back to VmRSS, if the system can."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def control_groups(root: Path, kind: str) -> list[Path]:
    """The folders of this process's control group and its parents; only the outermost one if the group is unknown."""
    path = ""
    if Path(GROUPS).exists():
        lines = (line.split(":", 2) for line in Path(GROUPS).read_text().splitlines())
        path = next((path for _, kinds, path in lines if kind in kinds.split(",")), "")
    inner = root / path.strip("/")
    return [inner, *(folder for folder in inner.parents if folder.is_relative_to(root))]


def _left(group: Path, limit: str, used: str, reclaimable: str) -> int | None:
    """The rest of a control group's limit; None if there is no such group or no limit."""
    if not (group / limit).exists() or not (total := (group / limit).read_text().strip()).isdigit():
        return None
    return max(0, int(total) - int((group / used).read_text()) + _table(group / "memory.stat")[reclaimable])


def _table(path: Path) -> dict[str, int]:
    """A file of lines that begin with a name and an integer."""
    lines = (line.replace(":", " ").split() for line in path.read_text().splitlines())
    return {name: int(value) for name, value, *_ in lines}


def full_memory(text: str) -> str:
    """Words for the memory's figures in a text of Ray's, which has ended a process; "" if it says no such thing."""
    if (full := _FULL.search(text)) is None:
        return ""
    return f"Ray killed a worker: its machine's memory was full, {full[1]} of {full[2]} GB with all other programs"
