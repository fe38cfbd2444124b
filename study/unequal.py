"""What experts of three sizes give to a lab of three machines, of which one has little memory and one has much.

Nine families of `shapes` in three clusters. Arms differ in the networks of their three experts: `small`, `medium`,
`large`, `mixed` (one of each; the cluster with the most rows has the large one), `even` (three alike, with as many
parameters together as `mixed`) and `long` (`small`, with the FLOPs of `mixed`). The networks stand for DiTs of sizes S,
B and L, the largest that 1, 4 and 16 GiB of a GPU hold by `ddm plan --islands`; their parameters are as 1 to 4 to 14,
and here as 1 to 4 to 14, too.

Each arm is trained by three islands, `ddm work` with a private Ray each: `attic` and `office` share one core of this
machine, `lab` has the other. Their `memory_gib` is what a small, a medium and a large network takes by `ddm plan`, so
that the product itself keeps models from islands with too little. Seconds are those from the start of the islands to
the last expert; "training" leaves out starts of Ray. Images are told their family and drawn by `once`. Distances are
those of EfficientNet-Lite0's features to pictures that no run has.

Expected, before any of it ran:

- Time of `mixed`: that of its large network, a third of `large`'s, and three quarters of `even`'s, which only `lab`
  can train. `small` takes a twelfth of it, `long` and `medium` half.
- The expert of each size is the same in `mixed` and in its equal arm, to the bit.
- Distance: `small` farther than `mixed` by a fifth, `mixed` than `large` by a tenth; `even` and `mixed` within a tenth
  of each other, `long` between `small` and `mixed`.
- The cluster with the small network is what `mixed` loses by, the one with the large network what it gains by.

Islands train the seeds below `--timed`, one at a time, with nothing else on the machine. This process trains the
others, for their distances alone. Killed, it goes on by the same command; then times aren't those of one piece.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(1, str(Path(__file__).parents[1]))
sys.path.insert(1, str(Path(__file__).parents[1] / "benchmarks"))

from claims import Report, options

from changes_ruler import Ruler
from changes_runs import NAMES, data_of, pictures, write_pictures
from ddm_ray.islands.needs import needs_of
from ddm_ray.placement import TrainPlacement
from ddm_ray.run.graph import PARTITION, ROUTER, expert, experts_of
from ddm_ray.run.info import PartitionInfo, TrainedInfo
from ddm_ray.run.run import Run
from ddm_ray.sampling.run_models import load_models
from studies import add_seeds, kept, made, trained, variant

WIDTHS = {"small": 64, "medium": 128, "large": 256, "even": 168}
"""Width of networks of two blocks; parameters are about as 1 to 4 to 16, and `even` is the mean of these."""
CLUSTERS = 3
ARMS = {
    "small": ("small",) * 3,
    "medium": ("medium",) * 3,
    "long": ("small",) * 3,
    "mixed": ("small", "medium", "large"),
    "even": ("even",) * 3,
    "large": ("large",) * 3,
}
"""Sizes of the networks, by clusters of more and more rows."""
ISLANDS = {"attic": ("small", 1), "office": ("medium", 1), "lab": ("large", 0)}
"""Islands: the largest network that each holds, and its core."""
LONGER = 7
"""Steps of `long` over the others': (1 + 4 + 16) / 3."""


@dataclass(frozen=True)
class Seed:
    """The arms' runs of one seed in a folder of its own."""

    folder: Path
    source: Path
    seed: int
    steps: int

    def run(self, arm: str) -> Run:
        """The run of an arm, prepared and partitioned, with its router, in which arms don't differ."""
        data = data_of(self.source, CLUSTERS, self.seed, self.steps)
        base = made(self.folder / "base", data, (), [ROUTER])
        experts = {}
        for cluster, size in self.sizes(base, arm).items():
            # A network learns at a rate in proportion to the inverse of its width.
            train = {"learning_rate": 0.256 / WIDTHS[size], "steps": self.steps * (LONGER if arm == "long" else 1)}
            experts[cluster] = {"model": {"width": WIDTHS[size]}, "train": train}
        return variant(base, self.folder / arm, data, [f"experts={json.dumps(experts)}"], [ROUTER])

    def sizes(self, run: Run, arm: str) -> dict[int, str]:
        """The size of each cluster's network, by clusters of more and more rows."""
        rows_K = PartitionInfo.of(run.require(PARTITION)).rows_K
        return dict(zip(sorted(range(CLUSTERS), key=lambda cluster: rows_K[cluster]), ARMS[arm], strict=True))

    def train(self, arm: str, timed: bool) -> dict[str, Any]:
        """Train an arm's experts, by islands if it's `timed`; seconds until the last one, and what they cost."""
        run = self.run(arm)
        seconds = by_islands(run, self.folder / "islands.yaml") if timed else None
        trained(run, experts_of(run.config))
        infos = [TrainedInfo.of(run.require(artifact)) for artifact in experts_of(run.config)]
        return {
            "seconds": seconds,
            "training": self.longest(run) if timed else None,
            "flops": sum(info.training_flops for info in infos),
            "parameters": sum(info.parameters for info in infos),
        }

    def longest(self, run: Run) -> float:
        """Seconds of training of the island that trained longest."""
        logs = [_log(run, island).read_text() for island in ISLANDS]
        own = [[each for each in experts_of(run.config) if f"trains {each}" in log] for log in logs]
        return max(sum(TrainedInfo.of(run.require(each)).seconds for each in trained) for trained in own)

    def write_islands(self) -> None:
        """The islands' file: each has what its largest network takes on a CPU, and hardly more."""
        run, islands = self.run("mixed"), dict[str, Any]()
        expert_of = {size: expert(cluster) for cluster, size in self.sizes(run, "mixed").items()}
        for island, (size, _) in ISLANDS.items():
            [need] = needs_of(run, [expert_of[size]])
            islands[island] = {"memory_gib": round(need.memory_in(TrainPlacement()) / 2**30 + 1e-4, 4)}
        (self.folder / "islands.yaml").write_text(json.dumps({"islands": islands}, indent=1))

    def measured(self, timed: bool, images: int, tell: Callable[[str], None]) -> dict[str, Any]:
        """Times and costs of all arms, and distances of their images."""
        self.write_islands()
        arms, families = dict[str, dict[str, Any]](), [*range(len(NAMES))]
        for arm in ARMS:
            arms[arm] = kept(self.folder / f"{arm}-training.json", partial(self.train, arm, timed))
            tell(f"seed {self.seed}, {arm}: trained, {arms[arm]['seconds']} s")
        ruler = Ruler.of(self.folder.parent / f"ruler-{images}", pictures, len(NAMES), images)
        for arm in ARMS:
            asked = partial(ruler.score, load_models(self.run(arm)), "once", families, families, self.seed, images)
            arms[arm] |= kept(self.folder / f"{arm}-images.json", asked)
            tell(f"seed {self.seed}, {arm}: distance {arms[arm]['old']:.4g}")
        mixed = self.run("mixed")
        sizes, info = self.sizes(mixed, "mixed"), PartitionInfo.of(mixed.require(PARTITION))
        size_of_family = [sizes[max(range(CLUSTERS), key=info.counts_CK[family].__getitem__)] for family in families]
        same = {size: _weights(mixed, each) == _weights(self.run(size), each) for each, size in sizes.items()}
        rows = {size: info.rows_K[cluster] for cluster, size in sizes.items()}
        return {"arms": arms, "size of family": size_of_family, "same weights": same, "rows": rows}


def _weights(run: Run, cluster: int) -> set[str]:
    """Digests of an expert's files of weights."""
    manifest = run.require(expert(cluster))
    return {record.sha256 for name, record in manifest.files.items() if name.endswith(".safetensors")}


def _log(run: Run, island: str) -> Path:
    return Path(f"{run.url}-{island}.log")


def by_islands(run: Run, islands: Path) -> float:
    """Train what is left of a run on all islands at once; seconds until the last one has ended."""
    began, processes = time.monotonic(), []
    for name, (_, core) in ISLANDS.items():
        command = ["ddm", "work", run.url, "--islands", str(islands), "--island", name]
        processes.append(
            subprocess.Popen(
                [str(Path(sys.executable).with_name(command[0])), *command[1:]],
                stdout=_log(run, name).open("a"),
                stderr=subprocess.STDOUT,
                preexec_fn=partial(os.sched_setaffinity, 0, {core}),
            )
        )
    for process in processes:
        process.wait()
    return time.monotonic() - began


def tell(report: Report, seeds: list[dict[str, Any]], timed: int) -> None:
    """Claims over all seeds."""
    add = partial(add_seeds, report)

    def ratio(what: str, other: str, measured: list[dict[str, Any]]) -> list[float]:
        return [each["arms"]["mixed"][what] / each["arms"][other][what] for each in measured]

    others = [arm for arm in ARMS if arm != "mixed"]
    for other in others if timed else ():
        add(f"seconds to finish, mixed over {other}", ratio("seconds", other, seeds[:timed]))
        add(f"the same without starts of Ray, mixed over {other}", ratio("training", other, seeds[:timed]))
    for other in others:
        add(f"FLOPs, mixed over {other}", ratio("flops", other, seeds[:1]))
    for other in others:
        add(f"distance, mixed over {other}", ratio("old", other, seeds))
    for size in ARMS["mixed"]:
        for other in ("small", "even", "large"):
            ratios = list[float]()
            for each in seeds:
                mixed, theirs = each["arms"]["mixed"]["by family"], each["arms"][other]["by family"]
                own = [str(family) for family, of in enumerate(each["size of family"]) if of == size]
                ratios.append(statistics.geometric_mean(mixed[family] / theirs[family] for family in own))
            add(f"distance of the families that the {size} network draws, mixed over {other}", ratios)
    for size in ARMS["mixed"]:
        add(f"{size} network: weights as in the equal arm", [each["same weights"][size] for each in seeds])


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("--folder", type=Path, help="keeps the runs, to go on from; a temporary one where not given")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--timed", type=int, default=1, help="seeds that islands train")
    parser.add_argument("--jobs", type=int, default=1, help="of the other seeds at once")
    parser.add_argument("--steps", type=int, default=2400, help="of each training but long's; a multiple of 20")
    parser.add_argument("--rows", type=int, default=800, help="pictures of each family")
    parser.add_argument("--images", type=int, default=120, help="images of each family that an arm is asked for")
    args = parser.parse_args()
    if args.quick:
        args.seeds, args.steps, args.rows, args.images = 1, min(args.steps, 60), min(args.rows, 120), 20
    report = Report("cpu")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.folder or Path(temporary)).resolve()
        write_pictures(folder / "pictures", args.rows)
        source = folder / "pictures" / "families"
        seeds = [Seed(folder / str(number), source, number, args.steps) for number in range(args.seeds)]
        measured = [seed.measured(True, args.images, report.progress) for seed in seeds[: args.timed]]
        with ThreadPoolExecutor(args.jobs) as pool:
            asked = [pool.submit(seed.measured, False, args.images, report.progress) for seed in seeds[args.timed :]]
            measured += [each.result() for each in asked]
    tell(report, measured, args.timed)
    report.finish(None)
    if args.json:
        args.json.write_text(json.dumps(report.as_json() | {"seeds": measured}, indent=1) + "\n")


if __name__ == "__main__":
    main()
