"""What every benchmark shares: its options, sides measured in turn, and the claims it writes."""

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

TRAIN = """
import sys
from ddm_ray.placement import TrainPlacement
from ddm_ray.run.graph import Artifact
from ddm_ray.train.local import train_locally
train_locally(sys.argv[1], [Artifact(each) for each in sys.argv[3:]], TrainPlacement.model_validate_json(sys.argv[2]))
"""
"""Code of a process that trains artifacts of a run: DeepSpeed keeps the first world of one, so each has its own."""


@dataclass(frozen=True)
class Claim:
    """A measured value; it holds if at most `target` (None: no target), and varies by `spread` (IQR / median)."""

    name: str
    value: float
    unit: str
    target: float | None = None
    spread: float | None = None

    @property
    def holds(self) -> bool | None:
        return None if self.target is None else self.value <= self.target


@dataclass
class Report:
    """The claims of one run, told on standard error as they come, and written once at the end."""

    device: str = "cpu"
    claims: list[Claim] = field(default_factory=list)

    def add(self, claim: Claim) -> None:
        self.claims.append(claim)
        self.progress(row(claim))

    def progress(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    def finish(self, path: Path | None) -> None:
        """Print the claims as a Markdown table and, where a path is given, write them as JSON."""
        print("| claim | value | target | holds | spread |\n|---|---|---|---|---|")
        for claim in self.claims:
            print(row(claim))
        if path is not None:
            path.write_text(json.dumps(self.as_json(), indent=1) + "\n")

    def as_json(self) -> dict[str, Any]:
        return {
            "claims": [{**asdict(claim), "holds": claim.holds} for claim in self.claims],
            "machine": machine(self.device),
            "commit": commit(),
            "command": shlex.join(["python", *sys.argv]),
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        }


def row(claim: Claim) -> str:
    """The claim as a row of the table."""
    target = "" if claim.target is None else f"≤ {claim.target:g}"
    holds = {None: "", True: "yes", False: "no"}[claim.holds]
    spread = "" if claim.spread is None else f"{claim.spread:.0%}"
    return f"| {claim.name} | {claim.value:.3g} {claim.unit} | {target} | {holds} | {spread} |"


def options(description: str) -> argparse.ArgumentParser:
    """A parser of what all benchmarks take."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller networks, fewer repeats: minutes")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the claims here")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    return parser


def measuring(
    description: str, measures: Sequence[str], sizes: Mapping[str, int], quick: Mapping[str, int]
) -> argparse.Namespace:
    """The options of a benchmark of several measures on the CPU: `--measure`, `--folder`, one a size; parsed.

    Sizes that aren't given are those of `sizes`, or with --quick of `quick`.
    """
    parser = options(description)
    parser.add_argument("--measure", nargs="+", default=measures, choices=measures)
    parser.add_argument("--folder", help="for what is made on the way; a temporary one where not given")
    for name in sizes:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help="by --quick where not given")
    args = parser.parse_args()
    if args.device != "cpu":
        parser.error("--device cuda: what is measured here runs on the CPU")
    for name, value in ({**sizes, **quick} if args.quick else sizes).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def interleaved(sides: Mapping[str, Callable[[], object]], repeats: int, device: str) -> dict[str, list[float]]:
    """Seconds of each side, `repeats` times all of them in turn after one round unmeasured."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(repeats + 1):
        for name, side in sides.items():
            synchronise(device)
            began = time.perf_counter()
            side()
            synchronise(device)
            if repeat:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def median_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """The median, and the interquartile range over it (0 for a single value)."""
    middle = statistics.median(values)
    if len(values) < 2:
        return middle, 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, (high - low) / abs(middle) if middle else 0.0


def commit() -> str:
    """The short commit, with "+" where files differ from it; "unknown" without git."""
    root = Path(__file__).parents[1]
    try:
        revision = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True)
        changed = subprocess.run(["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True)
    except FileNotFoundError:
        return "unknown"
    return revision.stdout.strip() + ("+" if changed.stdout else "") if not revision.returncode else "unknown"


def machine(device: str) -> str:
    """Processor, threads in use, accelerator and versions, in one line."""
    cpuinfo = Path("/proc/cpuinfo")
    models = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
    processor = models[0] if models else platform.machine()
    parts = [f"{processor}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}"]
    if device == "cuda":
        parts.append(torch.cuda.get_device_name())
    return ", ".join(parts)
