"""What it costs and yields to add a ninth family to a mixture of eight experts, and to drop one, over several seeds.

Pictures of nine families of `shapes`, label = family, lie in folders. For each seed another family comes last, and the
runs are made by the product itself: `base` (8 experts and a router on 8 families), `added` (derived from it by --add),
`begun` (the same, and the new expert begins as the nearest), `scratch` (9 experts on 9 families), `dropped` (derived
from that by --drop of the last family's cluster) and `starts` (the router of `added` from other first rows for the new
cluster). Images are asked for by family (told) or not (untold). Distances are those of EfficientNet-Lite0's features to
pictures that no run has; families are recognised by a classifier of such pictures.

Expected, before any of it ran:

- k-means finds the families (adjusted Rand index above .99), so that the clusters of both kinds of run are comparable.
- Adding costs a ninth of the experts' FLOPs and, by a router of a fifth of the steps, 12 % of what nine cost from
  scratch.
- Old families, told, by `once`: the same images to the bit. By `top-1`, and untold by `full`, at most 2 % farther than
  those of `base`, and on average of those of `scratch`, where seeds differ by a tenth.
- The router after a fifth of the steps: within a point of scratch's accuracy in each tenth of t, told and untold; after
  a tenth of the steps within two points.
- The new family, told: as far as in `scratch`, within a tenth; `begun` nearer by a tenth.
- Untold, the new family has a ninth of the images, by `once` and by `full`, within two standard errors.
- After dropping, its share of untold images falls below .5 %, and the others' distance is the same, told to the bit by
  `once`, and within 2 % untold.
- Starts: mean and zero rows differ by less than a point from the first twentieth of the steps on; a copy of the
  nearest cluster's row is behind them there by several points and level with them after a fifth.

It is killed and called again at will with one --folder. Each seed is a process, `--jobs` of them at once.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

sys.path.insert(1, str(Path(__file__).parents[1]))
sys.path.insert(1, str(Path(__file__).parents[1] / "benchmarks"))

from claims import Claim, Report, options

from changes_ruler import Ruler, router_accuracy
from changes_runs import (
    LAST,
    NAMES,
    PARTS,
    data_of,
    derived,
    flops_of,
    nearest_cluster,
    pictures,
    starts,
    with_router,
    write_pictures,
)
from ddm_ray.evaluate.real_rows import RealRows
from ddm_ray.models.router import Router
from ddm_ray.placement import TrainPlacement
from ddm_ray.run.graph import PARTITION, ROUTER, expert, experts_of
from ddm_ray.run.info import PartitionInfo
from ddm_ray.run.run import Run
from ddm_ray.sampling.run_models import load_models, load_trained
from studies import made, trained

FRACTIONS = {"a tenth of the steps": 2, "a fifth of the steps": 4, "all steps": 20}
SHARED = 4
"""Twentieths of the steps after which the router of `added` is the mixture's: a fifth."""
ASKED = {"told, once": 1.0, "told, top-1": 1.0, "untold, once": 1.0, "untold, full": 2 / 3}
"""How images are asked for and by which strategy, and the share of --images, since `full` takes nine times as long."""


def one_seed(folder: Path, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """What is measured of one seed."""
    torch.set_num_threads(1)
    began = time.monotonic()

    def progress(words: str) -> None:
        minutes = (time.monotonic() - began) / 60
        print(f"seed {seed}: {words}, {minutes:.1f} min", file=sys.stderr, flush=True)

    last, own = LAST[seed % len(LAST)], folder / str(seed)
    label, pictured = NAMES.index(last), folder / "pictures" / last
    old = [each for each in range(len(NAMES)) if each != label]
    part = args.steps // PARTS
    keeping = TrainPlacement(milestone_steps=part)

    def mixture(name: str, source: str, clusters: int) -> Run:
        run = made(own / name, data_of(pictured / source, clusters, seed, args.steps), (), ())
        return trained(run, [*experts_of(run.config), ROUTER])

    base, scratch = mixture("base", "base", 8), mixture("scratch", "all", 9)
    add = {"add": ((str(pictured / "last"), 1),)}
    added = trained(derived(base, own / "added", **add), [expert(8), ROUTER], keeping)
    nearest = nearest_cluster(added, 8)
    begun = trained(derived(base, own / "begun", begin_from=nearest, **add), [expert(8)])
    progress("trained")
    info = PartitionInfo.of(scratch.require(PARTITION))
    leaving = max(range(9), key=lambda place: info.counts_CK[label][place])
    dropped = derived(scratch, own / "dropped", drop=(leaving,))

    ruler = Ruler.of(folder / f"ruler-{args.images}", pictures, len(NAMES), args.images)
    shared = with_router(added, SHARED * part)
    mixtures = {
        "base": load_models(base),
        "added": shared,
        "scratch": load_models(scratch),
        "dropped": load_models(dropped),
    }
    measured: dict[str, Any] = {
        "last": last,
        "agreement": {"base": PartitionInfo.of(base.require(PARTITION)).ari, "scratch": info.ari},
        "floor": ruler.floor(old),
        "images": {},
    }
    for name, models in mixtures.items():
        families = old if name in ("base", "dropped") else [*range(len(NAMES))]
        for asked, share in ASKED.items():
            telling, strategy = asked.split(", ")
            labels = families if telling == "told" else None
            scored = ruler.score(models, strategy, labels, old, seed, round(share * args.images))
            measured["images"][f"{name}: {asked}"] = scored
        progress(f"images of {name}")
    for name, models in {"begun": load_models(begun), "dropped, last": mixtures["dropped"]}.items():
        scored = ruler.score(models, "once", [label], [label], seed, args.images)
        measured["images"][f"{name}: told, once"] = scored
    heldout = RealRows.of(added).heldout
    measured["router"] = {
        "base": router_accuracy(mixtures["base"], RealRows.of(base).heldout, seed),
        "scratch": router_accuracy(mixtures["scratch"], RealRows.of(scratch).heldout, seed),
        "dropped": router_accuracy(mixtures["dropped"], RealRows.of(dropped).heldout, seed),
    }
    measured["router"] |= {
        f"added, {words}": router_accuracy(with_router(added, twentieths * part), heldout, seed)
        for words, twentieths in FRACTIONS.items()
    }
    every = {**dict.fromkeys(scratch.experts, args.steps), ROUTER: args.steps}
    measured["cost"] = flops_of(added, {expert(8): args.steps, ROUTER: SHARED * part}) / flops_of(scratch, every)

    before = load_trained(base, ROUTER)
    assert isinstance(before, Router)
    first = {"mean": before.with_experts([*range(8), None]), **starts(before, nearest)}
    measured["starts"] = {}
    for name, router in first.items():
        run = added
        if name != "mean":
            file = own / f"{name}.safetensors"
            save_file(router.state_dict(), file)
            init = f"router.train.init_from={{source: '{file}'}}"
            run = derived(added, own / name, init, f"router.train.steps={SHARED * part}")
            trained(run, [ROUTER], keeping)
        curve = {0: router_accuracy(replace(shared, router=router), heldout, seed)}
        curve |= {
            step: router_accuracy(with_router(run, step), heldout, seed) for step in (part, 2 * part, SHARED * part)
        }
        measured["starts"][name] = curve
    cpu = [
        sum(getattr(resource.getrusage(of), f"ru_{kind}time") for kind in "us")
        for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    ]
    measured["minutes"] = {"all": (time.monotonic() - began) / 60, "cpu": sum(cpu) / 60}
    return measured


def ratio(measured: Sequence[dict[str, Any]], name: str, asked: str, other: str, what: str = "old") -> list[float]:
    """Distances of an arm over another's, by seed."""
    images = [each["images"] for each in measured]
    return [each[f"{name}: {asked}"][what] / each[f"{other}: {asked}"][what] for each in images]


def tell(report: Report, measured: list[dict[str, Any]]) -> None:
    """Claims over all seeds."""

    def add(words: str, values: list[float], target: float | None = None) -> None:
        spread = f"({min(values):.3g} to {max(values):.3g})"
        report.add(Claim(words, statistics.mean(values), spread, target))

    for run in ("base", "scratch"):
        add(f"agreement of clusters and families, {run}", [each["agreement"][run] for each in measured])
    add("FLOPs of adding, over scratch's", [each["cost"] for each in measured])
    for asked in ASKED:
        for other in ("base", "scratch"):
            add(f"{asked}: distance of old families, added over {other}", ratio(measured, "added", asked, other), 1.02)
        others = ratio(measured, "dropped", asked, "scratch")
        add(f"{asked}: distance of the others, dropped over scratch", others, 1.02)
        for name in ("added", "scratch", "dropped"):
            shares = [each["images"][f"{name}: {asked}"]["shares"][NAMES.index(each["last"])] for each in measured]
            add(f"{asked}: share of the last family, {name}", shares, 0.005 if name == "dropped" else None)
    told = [each["images"] for each in measured]
    label_of = [str(NAMES.index(each["last"])) for each in measured]

    def new(name: str) -> list[float]:
        return [each[f"{name}: told, once"]["by family"][label] for each, label in zip(told, label_of, strict=True)]

    for name in ("added", "begun"):
        add(
            f"told, once: distance of the new family, {name} over scratch",
            [one / other for one, other in zip(new(name), new("scratch"), strict=True)],
        )
    for words in FRACTIONS:
        for telling in ("told", "untold"):
            scored = [[each["router"][run][telling] for run in ("scratch", f"added, {words}")] for each in measured]
            gaps = [100 * (other["accuracy"] - own["accuracy"]) for other, own in scored]
            add(f"router, {words}, {telling}: points of accuracy below scratch", gaps, 1.0)
            tenths = [
                [100 * (one - two) for one, two in zip(other["by_t"], own["by_t"], strict=True)]
                for other, own in scored
            ]
            worst = max(zip(*tenths, strict=True), key=statistics.mean)
            add(f"router, {words}, {telling}: the same in its worst tenth of t", list(worst), 1.0)
    for name in measured[0]["starts"]:
        for step in measured[0]["starts"][name]:
            for telling in ("told", "untold"):
                of = [each["starts"][name][step][telling] for each in measured]
                add(f"start {name}, step {step}, {telling}: accuracy, %", [100 * each["accuracy"] for each in of])
                add(f"start {name}, step {step}, {telling}: cross-entropy", [each["cross_entropy"] for each in of])


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("--folder", type=Path, help="keeps the runs, to go on from; a temporary one where not given")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600, help="of each training; a multiple of 20")
    parser.add_argument("--rows", type=int, default=400, help="pictures of each family")
    parser.add_argument("--images", type=int, default=120, help="images of each family that an arm is asked for")
    parser.add_argument("--jobs", type=int, default=1, help="seeds at once, each by one thread")
    parser.add_argument("--only", type=int, metavar="SEED", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.seeds, args.steps, args.rows, args.images = 1, min(args.steps, 60), min(args.rows, 120), 20
    if args.only is not None:
        print(json.dumps(one_seed(args.folder, args.only, args)))
        return
    report = Report("cpu")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.folder or Path(temporary)).resolve()
        write_pictures(folder / "pictures", args.rows)
        command = [sys.executable, *sys.argv, "--folder", str(folder), "--only"]

        def run(seed: int) -> dict[str, Any]:
            process = subprocess.run([*command, str(seed)], stdout=subprocess.PIPE, check=True, text=True)
            report.progress(f"seed {seed}: done")
            measured: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
            return measured

        with ThreadPoolExecutor(args.jobs) as pool:
            measured = list(pool.map(run, range(args.seeds)))
    tell(report, measured)
    report.finish(None)
    if args.json:
        args.json.write_text(json.dumps(report.as_json() | {"seeds": measured}, indent=1) + "\n")


if __name__ == "__main__":
    main()
