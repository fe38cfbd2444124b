"""How far a run whose number of ranks changed is from one that was never interrupted: losses and weights.

As a script: `train_resizes.py CASES`, CASES a JSON object of lists, by the run's folder: {"world": ranks, "stop": the
step after which they end, none at the last, "zero_stage": ...}. Ranks are forked after the imports, which makes them
cheap, so that runs must have been made by another process: pyarrow's threads don't survive a fork.
"""

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

from claims import Claim, Report

from ddm_ray.run.graph import Artifact

ARTIFACT = Artifact("experts/000")
STEPS = 30
# Rows of an expert's batch: shares of 2 and of 3 ranks are unequal.
BATCH = 7
CHANGES = ((2, 3, 1), (1, 2), (3, 1))
CASES = tuple(
    (stage, precision, worlds)
    for precision, stages in (("fp32", (0, 1, 2, 3)), ("bf16", (1, 2, 3)))
    for stage in stages
    for worlds in CHANGES
)
QUICK = ((1, "fp32", (2, 3, 1)), (3, "bf16", (2, 3, 1)))
# Absolute differences, over STEPS steps: sums in another order.
MOST_DIFFERENCE = {"fp32": 1e-6, "bf16": 2e-3}
Case = tuple[int, str, tuple[int, ...]]


def settings(precision: str) -> tuple[str, ...]:
    """Of the tiny recipe's runs."""
    train = "expert.train"
    return f"{train}.steps={STEPS}", f"{train}.batch={BATCH}", f"{train}.precision={precision}"


def legs(zero_stage: int, worlds: Sequence[int]) -> list[dict[str, Any]]:
    """A run cut evenly among worlds of these sizes."""
    stops = [STEPS * (number + 1) // len(worlds) for number in range(len(worlds) - 1)]
    return [
        {"world": world, "stop": stop, "zero_stage": zero_stage}
        for world, stop in zip(worlds, [*stops, None], strict=True)
    ]


def name(zero_stage: int, precision: str, worlds: Sequence[int]) -> str:
    """Of a case, for people and folders."""
    return f"ZeRO {zero_stage}, {precision}, {' to '.join(map(str, worlds))} ranks"


def rank_main(rank: int, world: int, rendezvous: str, url: str, first: int, stop: int | None, zero_stage: int) -> None:
    """One rank; with `stop`, the last one has notice that its machine is about to go after that step."""
    from ddm_ray.errors import Preempted
    from ddm_ray.placement import TrainPlacement
    from ddm_ray.train import local, worker

    steps = count(first + 1)
    placement = TrainPlacement(zero_stage=zero_stage)
    with local.world(rank, world, rendezvous):
        try:
            worker.train(url, ARTIFACT, placement, notice=lambda: next(steps) == stop and rank == world - 1)
        except Preempted:
            assert stop is not None
        else:
            assert stop is None


def run_all(cases: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Train every case's legs, one after the other."""
    import torch.multiprocessing as mp

    from ddm_ray.train import worker  # noqa: F401
    from ddm_ray.train.deepspeed_setup import load_deepspeed

    load_deepspeed()
    import_module("deepspeed.runtime.zero.muon.muon_optimizer")  # seconds, which each rank would spend

    for url, legs_of_it in cases.items():
        first = 0
        for leg in legs_of_it:
            rendezvous = tempfile.mktemp(dir=Path(url).parent)
            given = (leg["world"], rendezvous, url, first, leg["stop"], leg["zero_stage"])
            mp.start_processes(rank_main, args=given, nprocs=leg["world"], start_method="fork")
            first = leg["stop"]
        print(url, file=sys.stderr, flush=True)


def differences(url: str, other: str) -> tuple[float, float]:
    """Largest absolute differences of two finished runs: of the losses, of the EMA weights."""
    from safetensors.torch import load

    from ddm_ray.run.run import Run

    def read(run: Run, file: str) -> dict[str, Any]:
        return load(run.read(ARTIFACT, f"{run.require(ARTIFACT).info['weights']}/{file}"))

    runs = Run.open(url), Run.open(other)
    mine, theirs = (read(run, "curve.safetensors")["loss"] for run in runs)
    assert len(mine) == len(theirs) == STEPS
    weights, others = (read(run, "ema.safetensors") for run in runs)
    assert weights.keys() == others.keys()
    most = max(float((weights[key] - others[key]).abs().max()) for key in weights)
    return float((mine - theirs).abs().max()), most


def tell(by_case: Mapping[Case, tuple[float, float]], report: Report) -> None:
    """The claims of all cases."""
    for (zero_stage, precision, worlds), (curve, weights) in by_case.items():
        target = MOST_DIFFERENCE[precision]
        report.add(Claim(f"{name(zero_stage, precision, worlds)}: losses", curve, "at most apart", target))
        report.add(Claim(f"{name(zero_stage, precision, worlds)}: weights", weights, "at most apart", target))


if __name__ == "__main__":
    run_all(json.loads(sys.argv[1]))
    print("{}")
