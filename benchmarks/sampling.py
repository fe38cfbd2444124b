"""Sampling from K experts beside one dense model of the same size: time, the router's share, memory.

Time: a batch of images by `once` and `top-1` against one such network in a plain Euler loop, and the same with texts
as conditions, there `once` and `full` (against K such networks). Noise is drawn by none of the sides: what it takes is
measured by itself and taken off the mixture's. So is the router's time, by its own calls. What remains is the cost of
splitting a batch by expert. `once` with labels draws experts from a uniform prior; elsewhere rows are dealt out evenly.
A network's calls are measured alone, too: as it is, compiled, and as CUDA graphs.
Memory: the peak of a fresh process for each number of experts, two rows an expert, all resident, or two at a time from
disk. All experts come from copies of one file, which the system's page cache holds. Weights are random.

Shapes: B rows, CHW image, K experts.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from claims import Claim, Report, median_and_spread, options
from sampling_calls import measure_calls
from sides import ROUTERS, Bench, DealtOut
from torch import nn

from ddm_ray.memory import taken_bytes
from ddm_ray.models import weights
from ddm_ray.models.flops import weights_bytes
from ddm_ray.sampling.noise import initial_noise
from ddm_ray.sampling.offload import OffloadedToDisk
from ddm_ray.sampling.request import SampleRequest

MIB = 2**20
# Of the time that as many dense models take, the router's left out.
MOST_TIME = 1.05
# Of one expert's weights, for each expert more, with two resident.
MOST_GROWTH = 0.1
# 256 tokens a row as the paper's experts have (XL/2 on cuda, S/2 of half the depth on a CPU), and what --quick cuts.
SIZES = {
    "cpu": {"width": 384, "depth": 6, "heads": 6, "patch_size": 2, "steps": 2, "repeats": 7},
    "cuda": {"width": 1152, "depth": 28, "heads": 16, "patch_size": 2, "steps": 4, "repeats": 7},
}
QUICK = {"depth": 2, "steps": 1, "repeats": 3}


def measure_time(bench: Bench, experts: Sequence[nn.Module], report: Report) -> None:
    """`once` and `top-1` of K experts against one dense model, for each batch size."""
    steps, routers = bench.args.steps, {k: DealtOut(bench.router(k, "Ti"), k) for k in bench.args.experts}
    for batch in bench.args.batches:
        noise, condition = initial_noise(range(batch), bench.shape), bench.condition(batch)
        once, top_1 = (bench.request(condition, strategy) for strategy in ("once", "top-1"))
        sides: dict[str, Callable[[], object]] = {
            "noise": partial(initial_noise, range(batch), bench.shape),
            "dense": partial(bench.dense, experts[0], noise, condition),
        }
        for k, router in routers.items():
            sides[f"once {k}"] = partial(bench.mixture, experts[:k], None, once)
            sides[f"top-1 {k}"] = partial(bench.mixture, experts[:k], router, top_1)
            sides[f"router {k}"] = partial(bench.router_alone, router, noise, condition, steps)
        seconds = bench.interleaved(sides)
        dense, drawing = seconds["dense"], seconds["noise"]
        milliseconds = [1000 * value / batch / steps for value in dense]
        add(report, f"dense, batch {batch}: time of an image's step", milliseconds, "ms")
        for k in routers:
            where = f"K={k}, batch {batch}"
            times = quotients(less(seconds[f"once {k}"], drawing), dense)
            add(report, f"once, {where}: time", times, "x dense", MOST_TIME)
            times = quotients(less(seconds[f"top-1 {k}"], drawing, seconds[f"router {k}"]), dense)
            add(report, f"top-1, {where}: time without the router's", times, "x dense", MOST_TIME)


def measure_texts(bench: Bench, report: Report) -> None:
    """With texts: `once` against one dense model for each batch size, `full` against K for the middle one."""
    steps, k = bench.args.steps, middle(bench.args.experts)
    experts = [bench.expert().to(bench.device) for _ in range(k)]
    router = DealtOut(bench.router(k, "Ti"), k)
    for batch in bench.args.batches:
        noise, condition = initial_noise(range(batch), bench.shape), bench.condition(batch)
        # `once` asks the router at pure noise alone, `full` at every velocity.
        calls = {"once": 1} | ({"full": steps} if batch == middle(bench.args.batches) else {})
        sides: dict[str, Callable[[], object]] = {
            "noise": partial(initial_noise, range(batch), bench.shape),
            "dense": partial(bench.dense, experts[0], noise, condition),
        }
        for strategy, num_calls in calls.items():
            sides[strategy] = partial(bench.mixture, experts, router, bench.request(condition, strategy))
            sides[f"router {strategy}"] = partial(bench.router_alone, router, noise, condition, num_calls)
        seconds = bench.interleaved(sides)
        for strategy in calls:
            networks = k if strategy == "full" else 1
            rest = less(seconds[strategy], seconds["noise"], seconds[f"router {strategy}"])
            times = [value / networks for value in quotients(rest, seconds["dense"])]
            name = f"texts, {strategy}, K={k}, batch {batch}: time without the router's"
            add(report, name, times, "x dense" if networks == 1 else "x K dense", MOST_TIME)


def measure_router(bench: Bench, experts: Sequence[nn.Module], report: Report) -> None:
    """The router's share of a trajectory's time, for the paper's size of router and a small one."""
    k, batch = middle(bench.args.experts), middle(bench.args.batches)
    noise, condition = initial_noise(range(batch), bench.shape), bench.condition(batch)
    for size in ROUTERS:
        level = bench.router(k, size)
        sides: dict[str, Callable[[], object]] = {
            "noise": partial(initial_noise, range(batch), bench.shape),
            "router": partial(bench.router_alone, level, noise, condition, bench.args.steps),
            "top-1": partial(bench.mixture, experts[:k], DealtOut(level, k), bench.request(condition, "top-1")),
            "full": partial(bench.mixture, experts[:k], level, bench.request(condition, "full")),
        }
        seconds = bench.interleaved(sides)
        for strategy in ("top-1", "full"):
            share = quotients(seconds["router"], less(seconds[strategy], seconds["noise"]))
            name = f"{strategy}, K={k}, batch {batch}: share of a router as {size} to XL"
            add(report, name, [100 * value for value in share], "%")


def measure_memory(bench: Bench, report: Report) -> None:
    """Peak memory against K, all experts resident or a few at a time from disk, and what the latter costs in time."""
    with tempfile.TemporaryDirectory() as folder:
        expert, file = bench.expert(), Path(folder) / "expert.safetensors"
        file.write_bytes(weights.weights_as_bytes(expert, bench.spec)[0])
        one = weights_bytes(expert, torch.float32) / MIB
        report.add(Claim("weights of one expert", one, "MiB"))
        for where in ("resident", "disk"):
            measure_growth(bench, where, file, one, report)
        for k in bench.args.experts:
            request, fetch = balanced(bench, k), partial(_fetch, bench, file)
            offloaded = OffloadedToDisk(fetch, [True] * k, bench.args.resident)
            sides: dict[str, Callable[[], object]] = {
                "resident": partial(bench.mixture, [fetch(expert) for expert in range(k)], None, request),
                "disk": partial(bench.mixture, offloaded, None, request),
            }
            seconds = bench.interleaved(sides)
            slower = quotients(seconds["disk"], seconds["resident"])
            name = f"disk, K={k}, batch {len(request.seeds)}, steps {bench.args.steps}: time"
            add(report, name, slower, "x resident")


def measure_growth(bench: Bench, where: str, file: Path, one: float, report: Report) -> None:
    """The peak of a process for each K, and how it grows with K, in weights of one expert (`one`, MiB)."""
    peaks = {k: _peak_of_a_process(k, where, file) for k in bench.args.experts}
    for k, peak in peaks.items():
        report.add(Claim(f"{where}, K={k}: peak memory", peak, "MiB"))
    if len(peaks) > 1:
        fewest, most = min(peaks), max(peaks)
        growth = (peaks[most] - peaks[fewest]) / (most - fewest) / one
        target = MOST_GROWTH if where == "disk" else None
        report.add(Claim(f"{where}: growth for each expert more", growth, "x its weights", target))


def balanced(bench: Bench, num_experts: int) -> SampleRequest:
    """Two images of each expert, shuffled: as `once`, but that no expert has more rows the fewer there are."""
    order_B = torch.randperm(2 * num_experts, generator=torch.Generator().manual_seed(0))
    return bench.request(bench.condition(2 * num_experts), "oracle", order_B % num_experts)


def memory_point(bench: Bench, num_experts: int, where: str, file: Path) -> None:
    """Print the MiB that sampling from so many experts takes at its peak, beyond what the program itself does."""
    fetch, gaps = partial(_fetch, bench, file), [True] * num_experts
    before = 0.0 if bench.device == "cuda" else taken_bytes("VmRSS") / MIB
    on_disk = where == "disk"
    experts = OffloadedToDisk(fetch, gaps, bench.args.resident) if on_disk else [fetch(k) for k in range(num_experts)]
    bench.mixture(experts, None, balanced(bench, num_experts))
    print(torch.cuda.max_memory_allocated() / MIB if bench.device == "cuda" else taken_bytes("VmHWM") / MIB - before)


def _fetch(bench: Bench, file: Path, expert: int) -> nn.Module:
    return weights.load_model(bench.spec, file.read_bytes()).to(bench.device)


def _peak_of_a_process(num_experts: int, where: str, file: Path) -> float:
    command = [sys.executable, *sys.argv, "--memory-of", str(num_experts), where, str(file)]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def middle(values: Sequence[int]) -> int:
    return values[len(values) // 2]


def less(total: Sequence[float], *parts: Sequence[float]) -> list[float]:
    return [value - sum(taken) for value, *taken in zip(total, *parts, strict=True)]


def quotients(above: Sequence[float], below: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(above, below, strict=True)]


def add(report: Report, name: str, values: Sequence[float], unit: str, target: float | None = None) -> None:
    median, spread = median_and_spread(values)
    report.add(Claim(name, median, unit, target, spread))


def arguments() -> argparse.Namespace:
    """The options, sizes filled in by device and --quick."""
    parser = options(__doc__ or "")
    parser.add_argument("--experts", type=int, nargs="+", default=[4, 8, 16], metavar="K")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64], metavar="B")
    parser.add_argument("--conditions", nargs="+", default=["labels", "texts"], choices=["labels", "texts"])
    parser.add_argument(
        "--calls",
        type=int,
        nargs="*",
        default=[1, 8, 32],
        metavar="B",
        help="rows of a network's calls, measured alone",
    )
    parser.add_argument("--resident", type=int, default=2, metavar="R", help="experts in memory at a time, from disk")
    parser.add_argument("--image-size", type=int, default=32, help="of latents with 4 channels")
    for name in SIZES["cpu"]:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help="by device and --quick where not given")
    parser.add_argument(
        "--memory-of",
        nargs=3,
        metavar=("K", "WHERE", "FILE"),
        help="only print the peak MiB of K experts loaded from FILE; WHERE is resident or disk",
    )
    args = parser.parse_args()
    for name, value in (SIZES[args.device] | (QUICK if args.quick else {})).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def main() -> None:
    args = arguments()
    bench = Bench(args)
    torch.manual_seed(0)
    if args.memory_of:
        num_experts, where, file = args.memory_of
        return memory_point(bench, int(num_experts), where, Path(file))
    report = Report(args.device)
    if args.calls:
        measure_calls(bench, report)
    if "labels" in args.conditions:
        measure_memory(bench, report)
        experts = [bench.expert().to(args.device) for _ in range(max(args.experts))]
        measure_time(bench, experts, report)
        measure_router(bench, experts, report)
        del experts
    if "texts" in args.conditions:
        measure_texts(Bench(args, texts=True), report)
    report.finish(args.json)


if __name__ == "__main__":
    main()
