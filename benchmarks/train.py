"""Training: the whole stack beside a plain loop, DeepSpeed beside PyTorch, checkpoints, recovery, other world sizes.

Stack: a job as `ddm train` runs it (private Ray, Ray Train, loader, heartbeats, curves, a checkpoint every so many
steps), and the engine's own loop in a process with rows in memory and nothing else. Both are started; then they run in
turns of a second, the other one stopped with all its processes. Steps are counted by heartbeats, but for those of the
first SETTLE_SECONDS: starting is in none. Two experts at once, on a core each: sums of speeds, to twice that of one
alone, and to two plain loops at once, which share caches and memory too. The tiny recipe's steps of few milliseconds
are told beside it.
Engine: the same model, AdamW, clipping and EMA in plain PyTorch, in one process, which keeps freed memory as a worker's
does; large batches, where arithmetic dominates, and small ones, which show what a parameter costs.
Saving: what training waits for to one flat copy of as many bytes; how slow steps are while the copy is written.
Recovery: from SIGKILL of a worker to the next attempt's first step, by the times of files and processes.
Threads: a step by one thread and by two, that sleep while they wait, as a worker's do, or spin.
Resizes: losses and weights after changes of the number of ranks, to a run that was never interrupted.
"""

import argparse
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import train_engine
import train_recovery
import train_resizes
import train_saving
import train_threads
from claims import Report, measuring
from data_compute import add, make_shard
from train_sides import finish, start
from train_turns import Side, both, in_turns

from ddm_ray.config import load_recipe
from ddm_ray.cores import WAIT_ASLEEP
from ddm_ray.run.graph import expert
from ddm_ray.run.run import Run

# Times of a step: speed at least 0.97 of the plain loop's, and 0.95 of one expert's alone.
MOST_STACK, MOST_TWO = 1 / 0.97, 1 / 0.95
SETTLE_SECONDS = 3.0
ROWS = 4000
# An expert of 1.3 million parameters on a batch of 8: about 50 ms a step on one core.
EXPERT = (
    "data.image_size=16",
    "data.channels=4",
    "data.latents={autoencoder: none, scale: 1.0}",
    "expert.model={patch_size: 2, width: 128, depth: 4, heads: 4}",
    "expert.train.batch=8",
)
SIZES = {
    "rounds": 4,
    "steps": 500,
    "checkpoint_steps": 250,
    "tiny_steps": 6000,
    "repeats": 5,
    "width": 384,
    "depth": 8,
    "kills": 20,
}
QUICK = {"rounds": 1, "steps": 160, "checkpoint_steps": 80, "tiny_steps": 0, "repeats": 3, "depth": 7, "kills": 2}
MEASURES = ("stack", "engine", "saving", "recovery", "threads", "resizes")
SECONDS_OF_A_REPEAT = 0.5
Start = Callable[[], list["subprocess.Popen[str]"]]


def make_run(folder: Path, settings: Sequence[str]) -> str:
    """A run of the tiny recipe with rows of noise in the shards of both clusters; where it is."""
    run = Run.create(str(folder), load_recipe("tiny", tuple(settings)))
    for cluster in range(run.config.partition.num_clusters):
        make_shard(run, ROWS, cluster)
    return run.url


def measure_stack(args: argparse.Namespace, folder: Path, report: Report) -> None:
    """Rounds of the plain loop, one expert through the stack, two at once and two loops at once, all in turns."""
    made = make_run(folder / "run", (*EXPERT, f"expert.train.steps={args.steps}"))
    tiny = make_run(folder / "tiny", [f"expert.train.steps={max(1, args.tiny_steps)}"])
    one, two = [expert(0)], [expert(0), expert(1)]
    rounds: dict[str, list[Side]] = {}
    for number in range(args.rounds):
        scratch = folder / f"round-{number}"
        sides = {
            "loop": loops(made, one),
            "one": stack(made, scratch / "one", args.checkpoint_steps, one),
            "two": stack(made, scratch / "two", args.checkpoint_steps, two),
            "two loops": loops(made, two),
        }
        if args.tiny_steps:
            sides |= {"tiny loop": loops(tiny, one), "tiny one": stack(tiny, scratch / "tiny", 500, one)}
        for name, side in in_turns(sides).items():
            rounds.setdefault(name, []).append(side)
        report.progress(f"round {number + 1} of {args.rounds}")
    tell_stack(rounds, args.checkpoint_steps, report)


def loops(url: str, artifacts: Sequence[str]) -> Start:
    """What starts plain loops on a run's rows, one for each artifact."""
    return lambda: [start("train_sides", "loop", url, each, keep_memory=True) for each in artifacts]


def stack(url: str, copied: Path, checkpoint_steps: int, artifacts: Sequence[str]) -> Start:
    """What starts jobs at once on a copy of a run."""
    shutil.copytree(url, copied)
    return lambda: [start("train_sides", "stack", copied, checkpoint_steps, *artifacts)]


def tell_stack(rounds: Mapping[str, Sequence[Side]], checkpoint_steps: int, report: Report) -> None:
    """The claims, of what all rounds of each side told."""

    def quotients(above: str, below: str, what: str = "seconds") -> list[float]:
        speeds = [both(*sides, SETTLE_SECONDS) for sides in zip(rounds[above], rounds[below], strict=True)]
        return [getattr(one, what) / getattr(other, what) for one, other in speeds]

    def alone(side: str) -> list[float]:
        return [1000 * both(each, each, SETTLE_SECONDS)[0].seconds for each in rounds[side]]

    add(report, "plain loop of the engine, 1.3M parameters, batch 8: a step", alone("loop"), "ms")
    name = f"step through the whole stack, checkpoint every {checkpoint_steps}"
    add(report, name, quotients("one", "loop"), "x plain loop", MOST_STACK)
    at_once = [2 * value for value in quotients("two", "one")]
    add(report, "two experts at once: a step, of one alone", at_once, "x", MOST_TWO)
    add(report, "two experts at once: CPU time of a step, of one alone", quotients("two", "one", "cpu"), "x")
    loops_at_once = [2 * value for value in quotients("two loops", "loop")]
    add(report, "two plain loops at once: a step, of one alone", loops_at_once, "x")
    add(report, "two experts at once: a step, of two plain loops", quotients("two", "two loops"), "x", MOST_TWO)
    if "tiny one" in rounds:
        add(report, "plain loop of the engine, recipe tiny: a step", alone("tiny loop"), "ms")
        tiny = quotients("tiny one", "tiny loop")
        add(report, "step of recipe tiny through the whole stack, checkpoint every 500", tiny, "x plain loop")


def measure_engine(args: argparse.Namespace, report: Report) -> None:
    """The engine beside PyTorch."""
    points = train_engine.QUICK if args.quick else train_engine.POINTS
    seconds = SECONDS_OF_A_REPEAT / (2 if args.quick else 1)
    train_engine.tell(finish(start("train_engine", args.repeats, seconds, *points, keep_memory=True)), report)


def measure_saving(args: argparse.Namespace, folder: Path, report: Report) -> None:
    """Checkpoints of a state of hundreds of MB."""
    sizes = (args.repeats, folder, args.width, args.depth)
    train_saving.tell(finish(start("train_saving", *sizes, keep_memory=True)), report)


def measure_recovery(args: argparse.Namespace, folder: Path, report: Report) -> None:
    """Kills of a worker, and what a fresh process needs for the same state."""
    url = make_run(folder / "run", (*EXPERT, "expert.train.steps=1000000"))
    recoveries: list[dict[str, float]] = finish(start("train_recovery", "kills", url, args.kills))
    alone = [finish(start("train_recovery", "parts", url, keep_memory=True)) for _ in range(min(3, args.kills))]
    train_recovery.tell(recoveries, alone, report)


def measure_threads(args: argparse.Namespace, report: Report) -> None:
    """Threads that wait asleep, and that spin."""
    ways = {"asleep": WAIT_ASLEEP, "spinning": {}}
    sides = {
        way: finish(start("train_threads", args.repeats, SECONDS_OF_A_REPEAT, environment=how))
        for way, how in ways.items()
    }
    train_threads.tell(sides, report)


def measure_resizes(args: argparse.Namespace, folder: Path, report: Report) -> None:
    """All ZeRO stages in both precisions, over worlds of changing size."""
    cases = train_resizes.QUICK if args.quick else train_resizes.CASES
    urls: dict[str, list[dict[str, Any]]] = {}
    for precision in ("fp32", "bf16"):
        uninterrupted = make_run(folder / precision, train_resizes.settings(precision))
        for zero_stage, _, worlds in (case for case in cases if case[1] == precision):
            named = folder / train_resizes.name(zero_stage, precision, worlds).replace(" ", "-")
            urls[shutil.copytree(uninterrupted, str(named))] = train_resizes.legs(zero_stage, worlds)
        urls[uninterrupted] = train_resizes.legs(1, (1,))
    finish(start("train_resizes", train_resizes.json.dumps(urls)))
    by_case = {}
    for zero_stage, precision, worlds in cases:
        named = folder / train_resizes.name(zero_stage, precision, worlds).replace(" ", "-")
        by_case[zero_stage, precision, worlds] = train_resizes.differences(str(folder / precision), str(named))
    train_resizes.tell(by_case, report)


def main() -> None:
    args = measuring(__doc__ or "", MEASURES, SIZES, QUICK)
    report = Report()
    began = time.monotonic()
    for measure in args.measure:
        with tempfile.TemporaryDirectory(prefix="ddm-train-", dir=args.folder) as folder:
            match measure:
                case "stack":
                    measure_stack(args, Path(folder), report)
                case "engine":
                    measure_engine(args, report)
                case "saving":
                    measure_saving(args, Path(folder), report)
                case "recovery":
                    measure_recovery(args, Path(folder), report)
                case "threads":
                    measure_threads(args, report)
                case "resizes":
                    measure_resizes(args, Path(folder), report)
        load = " ".join(f"{value:.1f}" for value in os.getloadavg())
        report.progress(f"{time.monotonic() - began:.0f} s so far; the machine's load: {load}")
    report.finish(args.json)


if __name__ == "__main__":
    main()
