"""What a second thread gains: a plain step of PyTorch by the threads and their waiting, over sizes of the model.

As a script: `train_threads.py REPEATS SECONDS`, in an environment that says how threads wait; prints a step's seconds.
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence

from claims import Claim, Report, median_and_spread
from train_engine import SIZES

POINTS = (("0.4M", 32), ("1.3M", 32), ("8.6M", 8))
"""Sizes of the model and of the batch: the first is the recipe digits' network."""


def measure(repeats: int, seconds: float) -> dict[str, dict[str, list[float]]]:
    """Seconds of a step by point, and by the number of threads, in turns."""
    import torch

    from ddm_ray.models.dit import DiT

    by_point: dict[str, dict[str, list[float]]] = {}
    for size, batch in POINTS:
        side, channels, (patch, width, depth, heads) = SIZES[size]
        shape = {"image_size": side, "channels": channels, "patch_size": patch, "width": width, "depth": depth}
        model = DiT(num_classes=10, heads=heads, **shape)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        rows = (torch.randn(batch, channels, side, side), torch.rand(batch), torch.zeros(batch, dtype=torch.long))
        taken: dict[str, list[float]] = {"1": [], "2": []}
        for number in range(repeats + 1):
            for threads in (("1", "2"), ("2", "1"))[number % 2]:
                torch.set_num_threads(int(threads))
                began, steps = time.perf_counter(), 0
                while time.perf_counter() - began < seconds:
                    optimizer.zero_grad()
                    model(*rows).square().mean().backward()
                    optimizer.step()
                    steps += 1
                if number:
                    taken[threads].append((time.perf_counter() - began) / steps)
        by_point[f"{size}:{batch}"] = taken
    return by_point


def tell(waiting: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]], report: Report) -> None:
    """The claims, of each way of waiting."""
    for way, by_point in waiting.items():
        for point, taken in by_point.items():
            median, spread = median_and_spread(taken["1"])
            report.add(Claim(f"{point}, {way}: a step of one thread", 1e3 * median, "ms", None, spread))
            ratios = [two / one for one, two in zip(taken["1"], taken["2"], strict=True)]
            median, spread = median_and_spread(ratios)
            report.add(Claim(f"{point}, {way}: of two threads", median, "x one", None, spread))


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]), float(sys.argv[2]))))
