"""Times, waits and kernels of work on a GPU, for gpu.py; on a CPU times alone."""

import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

PEAK = 989.4e12
"""FLOP/s of an H100 and of an H200 in bf16, dense."""
XL = {"image_size": 32, "channels": 4, "num_classes": 1000, "patch_size": 2, "width": 1152, "depth": 28, "heads": 16}
TINY = {"image_size": 8, "channels": 4, "num_classes": 10, "patch_size": 2, "width": 32, "depth": 2, "heads": 2}


def sync(device: str) -> None:
    """Wait for all that the device was given."""
    if device == "cuda":
        torch.cuda.synchronize()


def median_ms(work: Callable[[], object], device: str, repeats: int = 10, warm: int = 3) -> float:
    """Milliseconds by the host's clock around synchronised calls: what a user waits."""
    for _ in range(warm):
        work()
    took = []
    for _ in range(repeats):
        sync(device)
        began = time.perf_counter()
        work()
        sync(device)
        took.append(time.perf_counter() - began)
    return 1e3 * statistics.median(took)


def each_ms(work: Callable[[], object], device: str, count: int = 20) -> float:
    """Milliseconds of one call of many that are given to the device together: what the device itself takes."""
    return median_ms(lambda: [work() for _ in range(count)], device, 5, 2) / count


@contextmanager
def waits(device: str) -> Iterator[Counter[str]]:
    """Counts where the host waits for the GPU, by line, as torch's own mode sees it; nothing on a CPU."""
    places: Counter[str] = Counter()
    if device != "cuda":
        yield places
        return
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for each in warned:
        if "called a synchronizing" in str(each.message):  # and not the warning that the mode begins with
            places[f"{Path(each.filename).name}:{each.lineno}"] += 1


def kernels(work: Callable[[], object]) -> dict[str, Any]:
    """Kernels of one call, their milliseconds, and the ten that take most of them."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
        work()
        torch.cuda.synchronize()
    rows = [
        row
        for row in profiled.key_averages()
        # Marks of torch's own, as of an optimizer's step, span what they mark.
        if row.device_type.name == "CUDA" and not getattr(row, "is_user_annotation", False)
    ]
    longest = sorted(rows, key=lambda row: -row.self_device_time_total)[:10]
    return {
        "kernels": sum(row.count for row in rows),
        "busy_ms": sum(row.self_device_time_total for row in rows) / 1e3,
        "longest_ms": {row.key[:60]: round(row.self_device_time_total / 1e3, 2) for row in longest},
    }
