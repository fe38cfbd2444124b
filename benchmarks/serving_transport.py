"""What an image costs by each placement and strategy, by this code and by another commit's, or by this in another
environment, in turns.

`digits` is the run that is named; `large` has random weights, and a velocity of one image takes 20 ms or more, as those
of networks that people serve. Servers of both sides run all the time. Each round asks both for some images by one
client, one after the other, and the sides take turns to begin. Milliseconds of processors are those of all of a
server's processes, less what it takes while nobody asks. Ratios are medians of the rounds' own.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from claims import Claim, Report, interleaved, median_and_spread, options
from serving_load import Client, Served, serving

from ddm_ray.run.run import Run
from ddm_ray.sampling.run_models import load_models

ROOT = Path(__file__).parents[1]
STRATEGIES = ("once", "top-1", "top-2", "full")
PLACEMENTS = ("colocated", "per-expert")
LARGE = (
    "expert.model={width: 512, depth: 6, heads: 8, patch_size: 1}",
    "router.model={width: 64, depth: 2, heads: 2}",
    "evaluate.strategies=[once]",
)
LEAST_S = 0.02
"""Seconds that a velocity of one image takes at least, of `large`."""


def large_run(folder: Path, num_experts: int, tree: Path) -> str:
    """A run whose experts take about LEAST_S or more for a velocity of one image on one thread.

    `tree` makes it: an older one can't open what a newer one has made.
    """
    url, settings = str(folder / "large"), (*LARGE, f"partition.num_clusters={num_experts}")
    make = f"from tests.random_run import make_run; make_run({url!r}, 'digits', {settings!r}, {40 * num_experts})"
    subprocess.run([sys.executable, "-c", make], cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, check=True)
    return url


def velocity_s(run: str) -> float:
    """Median seconds of a velocity of one image by one expert, on one thread."""
    models = load_models(Run.open(run))
    expert, shape = models.experts[0], models.info.image_shape
    assert expert is not None
    with torch.inference_mode():
        call = {"": lambda: expert(torch.randn(1, *shape), torch.full((1,), 0.5), torch.tensor([7]))}
        return statistics.median(interleaved(call, 20, "cpu")[""])


def measure(name: str, run: str, most: float | None, args: Any, report: Report) -> None:
    """Latency and processors of an image; `most`: how many times those of the other side they may be."""
    for placement in args.placements:
        with ExitStack() as stack:
            sides = {"": stack.enter_context(serving(run, "--placement", placement))}
            if args.against or args.environment:
                tree, variables = args.against and args.against.resolve(), dict(args.environment)
                other = serving(run, "--placement", placement, tree=tree, environment=variables)
                sides[", before"] = stack.enter_context(other)
            idle = {side: served.idle_share() for side, served in sides.items()}
            for strategy in args.strategies:
                _compare(f"{name}, {placement}, {strategy}", strategy, sides, idle, most, args, report)


def _compare(
    name: str,
    strategy: str,
    sides: dict[str, Served],
    idle: dict[str, float],
    most: float | None,
    args: Any,
    report: Report,
) -> None:
    seconds, costs = dict[str, list[float]](), dict[str, list[float]]()
    for number in range(args.rounds + 1):
        for side in (list(sides), list(reversed(sides)))[number % 2]:
            took, cost = _round(sides[side], idle[side], strategy, args)
            if number:  # the first makes links, and warms up
                seconds.setdefault(side, []).append(took)
                costs.setdefault(side, []).append(cost)
    for kind, values in (("latency", seconds), ("processors", costs)):
        for side, own in values.items():
            median, spread = median_and_spread(own)
            report.add(Claim(f"{name}: {kind}{side}", 1e3 * median, "ms an image", None, spread))
        if len(values) > 1:
            ratios = [new / old for new, old in zip(values[""], values[", before"], strict=True)]
            median, spread = median_and_spread(ratios)
            report.add(Claim(f"{name}: {kind} over before", median, "x", most, spread))


def _round(served: Served, idle: float, strategy: str, args: Any) -> tuple[float, float]:
    """Seconds, and seconds of processors, of an image."""
    client, before, began = Client(served.port), served.cpu_seconds(), time.monotonic()
    for seed in range(args.images):
        answer = client.ask(class_label=seed % 10, seed=seed, strategy=strategy, num_inference_steps=args.steps)
        if answer.status != 200:
            sys.exit(f"{answer.status}: {answer.body[:500]!r}")
    took = time.monotonic() - began
    return took / args.images, (served.cpu_seconds() - before - idle * took) / args.images


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("run", metavar="RUN", help="a finished run with classes, such as runs/digits of `make demo`")
    parser.add_argument("--against", type=Path, metavar="TREE", help="another commit's checkout")
    pair = {"type": lambda text: tuple(text.split("=", 1)), "metavar": "NAME=VALUE"}
    parser.add_argument("--environment", nargs="+", default=[], help="variables of the other side", **pair)
    parser.add_argument("--placements", nargs="+", default=PLACEMENTS, choices=PLACEMENTS)
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES, choices=STRATEGIES)
    parser.add_argument("--networks", nargs="+", default=("digits", "large"), choices=("digits", "large"))
    parser.add_argument("--steps", type=int, default=10, help="steps of an image")
    args = parser.parse_args()
    args.rounds, args.images = (3, 4) if args.quick else (9, 10)
    torch.set_num_threads(1)
    report = Report("cpu")
    if "digits" in args.networks:
        measure("digits", os.path.abspath(args.run), None, args, report)
    if "large" in args.networks:
        with tempfile.TemporaryDirectory() as folder:
            run = large_run(Path(folder), 2 if args.quick else 4, args.against or ROOT)
            took = velocity_s(run)
            report.add(Claim("large: a velocity of one image", 1e3 * took, "ms"))
            if took < LEAST_S:
                sys.exit(f"large: a velocity takes {1e3 * took:.3g} ms, less than {1e3 * LEAST_S:g}: make LARGE wider")
            measure("large", run, 1.03, args, report)
    report.finish(args.json)


if __name__ == "__main__":
    main()
