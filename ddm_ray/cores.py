"""Cores that this process may use, and the number of threads for a share of them."""

import os
from pathlib import Path

from ddm_ray.memory import control_groups

WAIT_ASLEEP = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Environment in which threads sleep while they wait for each other. Set it before torch is loaded.

Otherwise each thread spins on a core. Where other processes needed that core, a step of a small network took 15 times
as long.
"""

# cgroup v2 and v1: mount point, controller, and the files of quota and period; v2 has both in one.
QUOTAS = (
    ("/sys/fs/cgroup", "", ("cpu.max",)),
    ("/sys/fs/cgroup/cpu", "cpu", ("cpu.cfs_quota_us", "cpu.cfs_period_us")),
)


def usable_cores() -> int:
    """Cores of this process's affinity, or whole cores of its container's or job's quota if these are fewer; >= 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    groups = [(group, names) for root, kind, names in QUOTAS for group in control_groups(Path(root), kind)]
    quotas = [quota for group, names in groups if (quota := _quota(group, names)) is not None]
    return max(1, min([cores, *map(int, quotas)]))


def busy_words() -> str:
    """Words on this machine's load if it has three processes or more for each core; empty otherwise.

    Both are of the machine, also in a container, which sees the machine's load.
    """
    cores, load = os.cpu_count() or 1, os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return f"; this machine is busy (load {load:.0f}, cores {cores})" if load >= 3 * cores else ""


def threads_for(cpus: float) -> int:
    """Number of threads for a process with so many CPUs: whole cores of this machine, at least 1.

    OMP_NUM_THREADS is an upper limit, if it is set.
    """
    limit = os.environ.get("OMP_NUM_THREADS", "")
    most = int(limit) if limit.isdecimal() and int(limit) else usable_cores()
    return max(1, min(int(cpus), usable_cores(), most))


def _quota(group: Path, names: tuple[str, ...]) -> float | None:
    """Cores that a control group may use at a time; None if there is no such group or no limit."""
    if not all((group / name).exists() for name in names):
        return None
    words = " ".join((group / name).read_text() for name in names).split()
    if len(words) != 2 or not all(word.isdecimal() for word in words):  # "max", or -1
        return None
    return int(words[0]) / int(words[1])
