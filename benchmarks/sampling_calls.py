"""A velocity of one network by the ways it can be computed: as it is, its blocks compiled, as CUDA graphs of either.

What it takes is that of one call after another, without anything between: on a GPU whichever is longer, the host's part
or the GPU's. Shapes: B rows.
"""

import copy
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from claims import Claim, Report, median_and_spread
from sides import Bench
from torch import Tensor

from ddm_ray.core.condition import Condition
from ddm_ray.sampling.buckets import Buckets, bucket_sizes
from ddm_ray.sampling.cuda_graphs import Graphs
from ddm_ray.sampling.driver import Field
from ddm_ray.sampling.run_models import dtype_of
from ddm_ray.serve.engine.computing import in_buckets

REPEATED = 10
Inputs = tuple[Tensor, Tensor, Condition]


def measure_calls(bench: Bench, report: Report) -> None:
    """Milliseconds a velocity for each number of rows, and what it takes to make code and graphs for all sizes."""
    on_gpu, most = bench.device == "cuda", max(bench.args.calls)
    if not on_gpu:
        report.progress("CUDA graphs are left out: there is no GPU")
    draw = torch.Generator().manual_seed(0)
    x_BCHW, t_B = torch.randn(most, *bench.shape, generator=draw), torch.linspace(0, 1, most)
    inputs = x_BCHW.to(bench.device), t_B.to(bench.device), bench.condition(most).to(bench.device)
    for precision in ("fp32", "bf16") if on_gpu else ("fp32",):
        plain = bench.expert().to(bench.device, dtype_of(precision))
        compiled, before = copy.deepcopy(plain), _reserved_bytes(on_gpu)
        began = time.perf_counter()
        made = in_buckets({"expert": compiled}, inputs, Graphs(*inputs) if on_gpu else None)["expert"]
        count = len(made.sizes)
        report.add(Claim(f"{precision}: {count} sizes made", time.perf_counter() - began, "s"))
        ways: dict[str, Field] = {"plain": plain, "compiled": compiled}
        if on_gpu:
            report.add(
                Claim(f"{precision}: memory of {count} graphs", (_reserved_bytes(on_gpu) - before) / 2**20, "MiB")
            )
            graphs = Graphs(*inputs)
            ways["graph"] = Buckets({size: graphs.captured(plain, size) for size in reversed(bucket_sizes(most))})
            ways["compiled graph"] = made
        for batch in bench.args.calls:
            rows = inputs[0][:batch], inputs[1][:batch], inputs[2][:batch]
            sides: dict[str, Callable[[], object]] = {name: partial(_calls, way, rows) for name, way in ways.items()}
            seconds = bench.interleaved(sides)
            for name in ways:
                where = f"{precision}, {batch} rows, {name}"
                _add(report, f"{where}: a velocity", [1000 * value / REPEATED for value in seconds[name]], "ms")
                if name != "plain":
                    ratios = [a / b for a, b in zip(seconds[name], seconds["plain"], strict=True)]
                    _add(report, f"{where}: time", ratios, "x plain")


def _calls(way: Field, inputs: Inputs) -> None:
    with torch.inference_mode():
        for _ in range(REPEATED):
            way(*inputs)


def _reserved_bytes(on_gpu: bool) -> int:
    """Bytes of the GPU that torch has."""
    if not on_gpu:
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def _add(report: Report, name: str, values: Sequence[float], unit: str) -> None:
    median, spread = median_and_spread(values)
    report.add(Claim(name, median, unit, None, spread))
