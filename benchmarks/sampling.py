"""Sampling from K experts beside one dense model of the same size: time, the router's share, memory.

Time: a batch of images by `once` and `top-1` against one such network in a plain Euler loop. The router is timed by
its own calls and taken off, so that what remains is the cost of splitting a batch by expert. `once` draws experts from
a uniform prior; for `top-1` rows are dealt out evenly, its worst case.
Memory: the peak of a fresh process for each number of experts, all resident, or two at a time from disk. All experts
come from copies of one file, which the system's page cache holds. Weights are random.

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
from claims import Claim, Report, interleaved, median_and_spread, options
from torch import Tensor, nn

from ddm_ray.models import weights
from ddm_ray.models.flops import weights_bytes
from ddm_ray.models.router import Router
from ddm_ray.sampling import driver
from ddm_ray.sampling.checkpoint import Models
from ddm_ray.sampling.request import MixtureInfo, SampleRequest
from ddm_ray.sampling.residence import Offloaded
from ddm_ray.sampling.trajectory import initial_noise

NUM_CLASSES = 1000
MIB = 2**20
# Of one dense model's time, the router's left out.
MOST_TIME = 1.05
# Of one expert's weights, for each expert more, with two resident.
MOST_GROWTH = 0.1
# Width of the router over the expert's; both are 12 layers to the expert's 28.
ROUTERS = {"Ti": 192 / 1152, "B": 768 / 1152}
# 256 tokens a row as the paper's experts have (XL/2 on cuda, S/2 of half the depth on a CPU), and what --quick cuts.
SIZES = {
    "cpu": {"width": 384, "depth": 6, "heads": 6, "patch_size": 2, "steps": 2, "repeats": 7},
    "cuda": {"width": 1152, "depth": 28, "heads": 16, "patch_size": 2, "steps": 4, "repeats": 7},
}
QUICK = {"depth": 2, "steps": 1, "repeats": 3}


class Bench:
    """Networks of one size, and the two sides: mixtures of them, and one in a loop by hand."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, args.device
        self.shape = (4, args.image_size, args.image_size)
        self.trunk = {
            "image_size": args.image_size,
            "channels": 4,
            "num_classes": NUM_CLASSES,
            "patch_size": args.patch_size,
        }

        size = {"width": args.width, "depth": args.depth, "heads": args.heads}
        self.spec = {"class": "DiT", "config": self.trunk | size}

    def expert(self) -> nn.Module:
        """One expert on the CPU, its weights random, none of them 0."""
        model = weights.build(self.spec)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.02)
        return model.eval()

    def router(self, num_experts: int, size: str) -> nn.Module:
        """A router in the proportion of `size` to XL. As initialised, it finds all experts equally likely."""
        heads = max(1, round(self.args.heads * ROUTERS[size]))
        width = 8 * heads * max(1, round(self.args.width * ROUTERS[size] / heads / 8))
        depth = max(1, round(self.args.depth * 12 / 28))
        model = Router(num_experts, **self.trunk, width=width, depth=depth, heads=heads)
        return model.eval().to(self.device)

    def info(self, num_experts: int) -> MixtureInfo:
        prior_CK = torch.full((NUM_CLASSES + 1, num_experts), 1 / num_experts, dtype=torch.float64)
        return MixtureInfo(num_experts, self.shape, NUM_CLASSES, prior_CK)

    def request(self, batch: int, strategy: str) -> SampleRequest:
        labels = torch.arange(batch) % NUM_CLASSES
        return SampleRequest(tuple(range(batch)), labels, steps=self.args.steps, strategy=strategy, solver="euler")

    def mixture(self, experts: driver.Experts, router: nn.Module | None, batch: int, strategy: str) -> object:
        return Models(self.info(len(experts)), experts, router, self.device).sample(self.request(batch, strategy))

    def dense(self, network: nn.Module, batch: int) -> Tensor:
        """One network in an Euler loop with nothing around it."""
        label_B, steps = (torch.arange(batch) % NUM_CLASSES).to(self.device), self.args.steps
        x_BCHW = initial_noise(range(batch), self.shape).to(self.device)
        with torch.inference_mode():
            for step in range(steps):
                t_B = torch.full((batch,), 1 - step / steps, device=self.device)
                x_BCHW = x_BCHW - network(x_BCHW, t_B, label_B) / steps
        return x_BCHW.cpu()

    def router_alone(self, router: nn.Module, batch: int) -> None:
        """A trajectory's calls of the router."""
        x_BCHW, label_B = initial_noise(range(batch), self.shape), torch.arange(batch) % NUM_CLASSES
        with torch.inference_mode():
            for step in range(self.args.steps):
                t_B = torch.full((batch,), 1 - step / self.args.steps)
                router(x_BCHW.to(self.device), t_B.to(self.device), label_B.to(self.device)).cpu()

    def interleaved(self, sides: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
        return interleaved(sides, self.args.repeats, self.device)


class DealtOut(nn.Module):
    """A router's work with another answer: row i belongs to expert i modulo K."""

    def __init__(self, router: nn.Module, num_experts: int) -> None:
        super().__init__()
        self.router, self.num_experts = router, num_experts

    def forward(self, x_BCHW: Tensor, t_B: Tensor, label_B: Tensor) -> Tensor:
        expert_B = torch.arange(len(x_BCHW), device=x_BCHW.device) % self.num_experts
        return self.router(x_BCHW, t_B, label_B) + 10 * nn.functional.one_hot(expert_B, self.num_experts)


def measure_time(bench: Bench, experts: Sequence[nn.Module], report: Report) -> None:
    """`once` and `top-1` of K experts against one dense model, for each batch size."""
    routers = {k: DealtOut(bench.router(k, "Ti"), k) for k in bench.args.experts}
    for batch in bench.args.batches:
        sides: dict[str, Callable[[], object]] = {"dense": partial(bench.dense, experts[0], batch)}
        for k, router in routers.items():
            sides[f"once {k}"] = partial(bench.mixture, experts[:k], None, batch, "once")
            sides[f"top-1 {k}"] = partial(bench.mixture, experts[:k], router, batch, "top-1")
            sides[f"router {k}"] = partial(bench.router_alone, router, batch)
        seconds = bench.interleaved(sides)
        dense = seconds["dense"]
        milliseconds = [1000 * value / batch / bench.args.steps for value in dense]
        add(report, f"dense, batch {batch}: time of an image's step", milliseconds, "ms")
        for k in routers:
            where = f"K={k}, batch {batch}"
            add(report, f"once, {where}: time", quotients(seconds[f"once {k}"], dense), "x dense", MOST_TIME)
            pairs = zip(seconds[f"top-1 {k}"], seconds[f"router {k}"], strict=True)
            rest = quotients([whole - router for whole, router in pairs], dense)
            add(report, f"top-1, {where}: time without the router's", rest, "x dense", MOST_TIME)


def measure_router(bench: Bench, experts: Sequence[nn.Module], report: Report) -> None:
    """The router's share of a trajectory's time, for the paper's size of router and a small one."""
    k = bench.args.experts[len(bench.args.experts) // 2]
    batch = bench.args.batches[len(bench.args.batches) // 2]
    for size in ROUTERS:
        level = bench.router(k, size)
        sides: dict[str, Callable[[], object]] = {
            "router": partial(bench.router_alone, level, batch),
            "top-1": partial(bench.mixture, experts[:k], DealtOut(level, k), batch, "top-1"),
            "full": partial(bench.mixture, experts[:k], level, batch, "full"),
        }
        seconds = bench.interleaved(sides)
        for strategy in ("top-1", "full"):
            share = [100 * value for value in quotients(seconds["router"], seconds[strategy])]
            add(report, f"{strategy}, K={k}, batch {batch}: share of a router as {size} to XL", share, "%")


def measure_memory(bench: Bench, report: Report) -> None:
    """Peak memory against K, all experts resident or two at a time from disk, and what the latter costs in time."""
    with tempfile.TemporaryDirectory() as folder:
        expert, file = bench.expert(), Path(folder) / "expert.safetensors"
        file.write_bytes(weights.to_bytes(expert, bench.spec)[0])
        one = weights_bytes(expert, torch.float32) / MIB
        report.add(Claim("weights of one expert", one, "MiB"))
        for where in ("resident", "disk"):
            peaks = {k: _peak_of_a_process(k, where, file) for k in bench.args.experts}
            for k, peak in peaks.items():
                report.add(Claim(f"{where}, K={k}: peak memory", peak, "MiB"))
            if len(peaks) > 1:
                fewest, most = min(peaks), max(peaks)
                growth = (peaks[most] - peaks[fewest]) / (most - fewest) / one
                target = MOST_GROWTH if where == "disk" else None
                report.add(Claim(f"{where}: growth for each expert more", growth, "x its weights", target))
        for k in bench.args.experts:
            batch = 2 * k
            fetch = partial(_fetch, bench, file)
            sides: dict[str, Callable[[], object]] = {
                "resident": partial(bench.mixture, [fetch(expert) for expert in range(k)], None, batch, "once"),
                "disk": partial(bench.mixture, Offloaded(fetch, [True] * k), None, batch, "once"),
            }
            seconds = bench.interleaved(sides)
            slower = quotients(seconds["disk"], seconds["resident"])
            add(report, f"disk, once, K={k}, batch {batch}, steps {bench.args.steps}: time", slower, "x resident")


def memory_point(bench: Bench, num_experts: int, where: str, file: Path) -> None:
    """Print the MiB that sampling from so many experts takes at its peak, beyond what the program itself does."""
    fetch = partial(_fetch, bench, file)
    before = 0.0 if bench.device == "cuda" else _status("VmRSS")
    experts = Offloaded(fetch, [True] * num_experts) if where == "disk" else [fetch(k) for k in range(num_experts)]
    bench.mixture(experts, None, 2 * max(bench.args.experts), "once")
    print(torch.cuda.max_memory_allocated() / MIB if bench.device == "cuda" else _status("VmHWM") - before)


def _fetch(bench: Bench, file: Path, expert: int) -> nn.Module:
    return weights.load(bench.spec, file.read_bytes()).to(bench.device)


def _peak_of_a_process(num_experts: int, where: str, file: Path) -> float:
    command = [sys.executable, *sys.argv, "--memory-of", str(num_experts), where, str(file)]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def _status(name: str) -> float:
    # Not getrusage's peak: it counts what the process was before exec.
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024


def quotients(above: Sequence[float], below: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(above, below, strict=True)]


def add(report: Report, name: str, values: Sequence[float], unit: str, target: float | None = None) -> None:
    middle, spread = median_and_spread(values)
    report.add(Claim(name, middle, unit, target, spread))


def arguments() -> argparse.Namespace:
    """The options, sizes filled in by device and --quick."""
    parser = options(__doc__ or "")
    parser.add_argument("--experts", type=int, nargs="+", default=[4, 8, 16], metavar="K")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64], metavar="B")
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
    measure_memory(bench, report)
    experts = [bench.expert().to(args.device) for _ in range(max(args.experts))]
    measure_time(bench, experts, report)
    measure_router(bench, experts, report)
    report.finish(args.json)


if __name__ == "__main__":
    main()
