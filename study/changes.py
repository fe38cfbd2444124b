"""What it costs and yields to add a ninth family to a mixture of eight experts, and to drop one, over several seeds.

Pictures of nine families of `shapes`, label = family, lie in folders. For each seed another family comes last, and the
runs are made by the product itself: `base` (8 experts and a router on 8 families), `added` (derived from it by --add),
`begun` (the same, and the new expert begins as the nearest), `scratch` (9 experts on 9 families), `dropped` (derived
from that by --drop of the last family's cluster) and `starts` (the router of `added` from another first row of its head
for the new cluster). Images are asked for by family (told) or not (untold). Distances are those of
EfficientNet-Lite0's features to pictures that no run has; families are recognised by a classifier of such pictures.

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

Two routers were added when those of two seeds were measured: `anew`, that of `added` from random weights with all
steps, since clusters of k-means weren't the same in seed 0; and one of which half of the rows are untold. Expected: a
router that goes on has too few untold rows, a tenth, so that the latter is within a point of `anew`. Last came untold
images by these, expected within a tenth of scratch's.

It is killed and called again at will with one --folder. Each seed is a process, `--jobs` of them at once.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import save_file

sys.path.insert(1, str(Path(__file__).parents[1]))
sys.path.insert(1, str(Path(__file__).parents[1] / "benchmarks"))

from claims import Report, options

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
from ddm_ray.sampling.run_models import Models, load_models, load_trained
from studies import add_seeds, kept, made, trained

HALF = "a fifth of the steps, half of the rows untold"
FRACTIONS = {"a tenth of the steps": 2, "a fifth of the steps": 4, "all steps": 20}
SHARED = 4
"""Twentieths of the steps after which the router of `added` is the mixture's: a fifth."""
ASKED = {"told, once": 1.0, "told, top-1": 1.0, "untold, once": 1.0, "untold, full": 2 / 3}
"""How images are asked for and by which strategy, and the share of --images, since `full` takes nine times as long."""


@dataclass(frozen=True)
class Measuring:
    """The runs of one seed, trained; `last`: the family that comes last, `source`: its pictures."""

    folder: Path
    seed: int
    steps: int
    images: int
    last: str
    base: Run
    added: Run
    scratch: Run

    @classmethod
    def of(cls, folder: Path, seed: int, args: argparse.Namespace) -> Self:
        """Train what all measures need."""
        last, own = LAST[seed % len(LAST)], folder / str(seed)
        pictured = folder / "pictures" / last

        def mixture(name: str, source: str, clusters: int) -> Run:
            run = made(own / name, data_of(pictured / source, clusters, seed, args.steps), (), ())
            return trained(run, [*experts_of(run.config), ROUTER])

        base, scratch = mixture("base", "base", 8), mixture("scratch", "all", 9)
        added = derived(base, own / "added", add=((str(pictured / "last"), 1),))
        trained(added, [expert(8), ROUTER], TrainPlacement(milestone_steps=args.steps // PARTS))
        return cls(own, seed, args.steps, args.images, last, base, added, scratch)

    @property
    def label(self) -> int:
        """The label of the last family."""
        return NAMES.index(self.last)

    @property
    def part(self) -> int:
        """A twentieth of the steps."""
        return self.steps // PARTS

    def measure_images(self) -> dict[str, Any]:
        """What images are like, and what adding costs."""
        old = [each for each in range(len(NAMES)) if each != self.label]
        source = self.folder.parent / "pictures" / self.last / "last"
        near = nearest_cluster(self.added, 8)
        begun = derived(self.base, self.folder / "begun", begin_from=near, add=((str(source), 1),))
        info = PartitionInfo.of(self.scratch.require(PARTITION))
        leaving = max(range(9), key=lambda place: info.counts_CK[self.label][place])
        dropped = load_models(derived(self.scratch, self.folder / "dropped", drop=(leaving,)))
        mixtures = {
            "base": load_models(self.base),
            "added": with_router(self.added, SHARED * self.part),
            "scratch": load_models(self.scratch),
            "dropped": dropped,
        }
        ruler = Ruler.of(self.folder.parent / f"ruler-{self.images}", pictures, len(NAMES), self.images)
        images = dict[str, Any]()
        for name, models in mixtures.items():
            families = old if name in ("base", "dropped") else [*range(len(NAMES))]
            for asked, share in ASKED.items():
                telling, strategy = asked.split(", ")
                labels, number = families if telling == "told" else None, round(share * self.images)
                images[f"{name}: {asked}"] = ruler.score(models, strategy, labels, old, self.seed, number)
        for name, models in {"begun": load_models(trained(begun, [expert(8)])), "dropped, last": dropped}.items():
            scored = ruler.score(models, "once", [self.label], [self.label], self.seed, self.images)
            images[f"{name}: told, once"] = scored
        every = {**dict.fromkeys(self.scratch.experts, self.steps), ROUTER: self.steps}
        adding = {expert(8): self.steps, ROUTER: SHARED * self.part}
        return {
            "agreement": {"base": PartitionInfo.of(self.base.require(PARTITION)).ari, "scratch": info.ari},
            "cost": flops_of(self.added, adding) / flops_of(self.scratch, every),
            "floor": ruler.floor(old),
            "images": images,
        }

    def measure_routers(self) -> dict[str, Any]:
        """What routers know of held-out rows, and how soon."""
        before, near = load_trained(self.base, ROUTER), nearest_cluster(self.added, 8)
        assert isinstance(before, Router)
        runs, after = {"mean": self.added}, SHARED * self.part
        first = {"mean": before.with_experts([*range(8), None]), **starts(before, near)}
        for name, router in first.items():
            save_file(router.state_dict(), self.folder / f"{name}.safetensors")
            if name != "mean":
                runs[name] = self._another_router(name, name, f"router.train.steps={after}")
        half = self._another_router("half", "mean", f"router.train.steps={after}", "router.train.condition_dropout=0.5")
        anew = self._another_router("anew", None)
        every = load_models(self.added)
        continued = {
            f"added, {words}": self._score(with_router(self.added, number * self.part))
            for words, number in FRACTIONS.items()
        }
        return {
            "routers": {
                "base": self._score(load_models(self.base), self.base),
                "scratch": self._score(load_models(self.scratch), self.scratch),
                "anew": self._score(with_router(anew, self.steps)),
                "anew, a fifth of the steps": self._score(with_router(anew, after)),
                **continued,
                f"added, {HALF}": self._score(with_router(half, after)),
            },
            "starts": {
                name: {"0": self._score(replace(every, router=first[name]))}
                | {str(n): self._score(with_router(run, n * self.part)) for n in (1, 2, SHARED)}
                for name, run in runs.items()
            },
        }

    def measure_untold(self) -> dict[str, Any]:
        """What untold images by `full` are like with other routers of `added` than the one of a fifth of the steps."""
        old = [each for each in range(len(NAMES)) if each != self.label]
        ruler = Ruler.of(self.folder.parent / f"ruler-{self.images}", pictures, len(NAMES), self.images)
        half, anew = (Run.open(str(self.folder / name)) for name in ("half", "anew"))
        mixtures = {
            HALF: with_router(half, SHARED * self.part),
            "all steps": with_router(self.added, self.steps),
            "anew": with_router(anew, self.steps),
        }
        number = round(ASKED["untold, full"] * self.images)
        return {
            "untold, full": {
                words: ruler.score(models, "full", None, old, self.seed, number) for words, models in mixtures.items()
            }
        }

    def _another_router(self, name: str, start: str | None, *settings: str) -> Run:
        """The run `added` with a router that begins otherwise, or from random weights."""
        init = f"{{source: '{self.folder / f'{start}.safetensors'}'}}" if start else "null"
        run = derived(self.added, self.folder / name, f"router.train.init_from={init}", *settings)
        return trained(run, [ROUTER], TrainPlacement(milestone_steps=self.part))

    def _score(self, models: Models, run: Run | None = None) -> dict[str, Any]:
        return router_accuracy(models, RealRows.of(run or self.added).heldout, self.seed)


def one_seed(folder: Path, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """What is measured of one seed; each measure is kept in a file of its own."""
    torch.set_num_threads(1)
    measuring = Measuring.of(folder, seed, args)
    measured: dict[str, Any] = {"last": measuring.last}
    measures = {
        "images": measuring.measure_images,
        "routers": measuring.measure_routers,
        "untold": measuring.measure_untold,
    }
    for name, measure in measures.items():
        measured |= kept(folder / str(seed) / f"{name}.json", measure)
    return measured


def ratio(measured: Sequence[dict[str, Any]], name: str, asked: str, other: str, what: str = "old") -> list[float]:
    """Distances of an arm over another's, by seed."""
    images = [each["images"] for each in measured]
    return [each[f"{name}: {asked}"][what] / each[f"{other}: {asked}"][what] for each in images]


def _worst_family(images: dict[str, Any], name: str, other: str) -> float:
    """The largest ratio of an old family's distances."""
    theirs = images[other]["by family"]
    ratios: list[float] = [images[name]["by family"][family] / theirs[family] for family in theirs]
    return max(ratios)


def tell(report: Report, measured: list[dict[str, Any]]) -> None:
    """Claims over all seeds."""
    add = partial(add_seeds, report)

    for run in ("base", "scratch"):
        add(f"agreement of clusters and families, {run}", [each["agreement"][run] for each in measured])
    floors = [each["floor"]["old"] / each["images"]["base: told, once"]["old"] for each in measured]
    add("told, once: distance of as many other pictures, over that of base's images", floors)
    add("FLOPs of adding, over scratch's", [each["cost"] for each in measured])
    for asked in ASKED:
        for other in ("base", "scratch"):
            add(f"{asked}: distance of old families, added over {other}", ratio(measured, "added", asked, other), 1.02)
        if asked.startswith("told"):
            worst = [_worst_family(each["images"], f"added: {asked}", f"base: {asked}") for each in measured]
            add(f"{asked}: distance of the family that loses most, added over base", worst)
        others = ratio(measured, "dropped", asked, "scratch")
        add(f"{asked}: distance of the others, dropped over scratch", others, 1.02)
        for name in ("added", "scratch", "dropped"):
            shares = [each["images"][f"{name}: {asked}"]["shares"][NAMES.index(each["last"])] for each in measured]
            add(f"{asked}: share of the last family, {name}", shares, 0.005 if name == "dropped" else None)
    for words in measured[0]["untold, full"]:
        pairs = [(each["untold, full"][words], each["images"]["scratch: untold, full"]) for each in measured]
        add(
            f"untold, full: the same with the router of {words}",
            [own["old"] / other["old"] for own, other in pairs],
            1.02,
        )
    images = [each["images"] for each in measured]
    label_of = [str(NAMES.index(each["last"])) for each in measured]

    def new(name: str) -> list[float]:
        return [each[f"{name}: told, once"]["by family"][label] for each, label in zip(images, label_of, strict=True)]

    for name in ("added", "begun"):
        add(
            f"told, once: distance of the new family, {name} over scratch",
            [one / other for one, other in zip(new(name), new("scratch"), strict=True)],
        )
    for words in (*FRACTIONS, HALF):
        for other in ("scratch", "anew"):
            for telling in ("told", "untold"):
                scores = [[each["routers"][run][telling] for run in (other, f"added, {words}")] for each in measured]
                gaps = [100 * (theirs["accuracy"] - own["accuracy"]) for theirs, own in scores]
                add(f"router, {words}, {telling}: points of accuracy below {other}", gaps, 1.0)
                tenths = [
                    [100 * (one - two) for one, two in zip(theirs["by_t"], own["by_t"], strict=True)]
                    for theirs, own in scores
                ]
                worst = max(map(list, zip(*tenths, strict=True)), key=statistics.mean)
                add(f"router, {words}, {telling}: points below {other} in its worst tenth of t", worst, 1.0)
    for name in measured[0]["starts"]:
        for twentieths in ("0", "1", str(SHARED)):
            untold = [each["starts"][name][twentieths]["untold"] for each in measured]
            words = f"start {name}, {twentieths} twentieths of the steps, untold"
            add(f"{words}: accuracy, %", [100 * each["accuracy"] for each in untold])
            add(f"{words}: cross-entropy", [each["cross_entropy"] for each in untold])


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
