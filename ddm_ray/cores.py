"""Cores of this machine that this process may use, and threads for a share of them."""

import os
from pathlib import Path

from ddm_ray.memory import control_groups

WAIT_ASLEEP = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Environment in which threads that wait for each other sleep; set before torch is loaded.

Else they spin, each on a core: where others want that core, a step of a small network took 15 times as long.
"""

# cgroup v2 and v1: mount point, controller, and the files of quota and period; v2 has both in one.
QUOTAS = (
    ("/sys/fs/cgroup", "", ("cpu.max",)),
    ("/sys/fs/cgroup/cpu", "cpu", ("cpu.cfs_quota_us", "cpu.cfs_period_us")),
)


def usable_cores() -> int:
    """Cores of this process's affinity or, if fewer, whole ones of its container's or batch job's quota; 1 or more."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    groups = [(group, names) for root, kind, names in QUOTAS for group in control_groups(Path(root), kind)]
    quotas = [quota for group, names in groups if (quota := _quota(group, names)) is not None]
    return max(1, min([cores, *map(int, quotas)]))


def threads_for(cpus: float) -> int:
    """Threads of a process that has so many CPUs: the whole ones that are here, 1 or more.

    No more than OMP_NUM_THREADS says, if that is set.
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
