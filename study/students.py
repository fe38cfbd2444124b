"""Students by their settings, beside the monolith: what reaches it at no more FLOPs, over several seeds.

`digits` (4 experts) and `shapes` (8): experts and monolith are trained once a seed, then a student for each setting,
with evaluations of equal samples. Distance and held-out loss are told over the monolith's of the same seed, as the mean
and the range over seeds. It is killed and called again at will with one --folder. Each data set and seed is a process,
`--jobs` of them at once. `replay` measures a router that is trained on the experts' samples beside one of real rows.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).parents[1]))
sys.path.insert(1, str(Path(__file__).parents[1] / "benchmarks"))

from claims import Claim, Report, options

from ddm_ray.data.sharded.serial import serial
from ddm_ray.run.graph import MONOLITH, ROUTER, STUDENT, Artifact, experts_of
from ddm_ray.train.replay import make_replay
from studies import BY_NAME, Data, flops, made, metrics, trained, variant

MEASURES = ("students", "replay")
# By the factor on the schedule's steps, and fields of `student` and its `train`, in place of the default's: taught by
# its rows' own experts, at a quarter of the monolith's batch, for as many steps, from random weights.
SETTINGS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "twice the learning rate": {"rate": 2.0},
    "half the learning rate": {"rate": 0.5},
    "twice the batch": {"batch": 2},
    "3 times as many steps": {"steps": 3},
    "a third of the loss is the data's": {"student": ["student.data_weight=0.33"]},
    "3 times as many steps, a third is the data's": {"steps": 3, "student": ["student.data_weight=0.33"]},
    "from the largest expert": {"student": ["student.start=largest"]},
    "from the experts' average": {"student": ["student.start=average"]},
    "3 times as many steps, from the largest": {"steps": 3, "student": ["student.start=largest"]},
    "taught by full": {"student": ["student.teacher=full"]},
    "taught by guidance 1.5": {"student": ["student.guidance_scale=1.5"]},
    "taught by guidance 1.5, from the largest": {"student": ["student.guidance_scale=1.5", "student.start=largest"]},
    "taught by guidance 1.5, from the largest, twice as many steps": {
        "steps": 2,
        "student": ["student.guidance_scale=1.5", "student.start=largest"],
    },
    "slower average of weights, 3 times as many steps": {"steps": 3, "ema": 0.999},
}
QUICK_SETTINGS = ("as it is", "3 times as many steps")
ROUTED = ("once", "top-1", "top-2", "full")


def settings_of(seed: int, steps: int) -> list[str]:
    """Settings of a run with this seed."""
    return [
        f"expert.train.steps={steps}",
        f"router.train.steps={steps}",
        f"expert.train.seed={seed}",
        f"router.train.seed={seed}",
        "evaluate.strategies=[once]",
    ]


def student_of(change: dict[str, Any], seed: int, steps: int) -> list[str]:
    """Settings of a student with a change."""
    train = {
        "steps": steps * change.get("steps", 1),
        "batch": 32 * change.get("batch", 1),
        "learning_rate": 3.0e-3 * change.get("rate", 1.0),
        "warmup_steps": 50,
        "ema_decay": change.get("ema", 0.997),
        "condition_dropout": 0.1,
        "seed": seed,
    }
    return [f"student.train={json.dumps(train)}", *change.get("student", [])]


def one_seed(data: Data, folder: Path, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """What is measured of one data set and seed, by setting."""
    own = settings_of(seed, args.steps)
    experts = experts_of(made(folder / "base", data, own, ()).config)
    base = made(folder / "base", data, own, [*experts, ROUTER, MONOLITH])
    measured: dict[str, Any] = {}
    if "students" in args.measure:
        shared = (*experts, ROUTER, MONOLITH)
        for name in args.settings:
            change = SETTINGS[name]
            where = folder / name.replace(" ", "-").replace("'", "").replace(",", "")
            run = variant(base, where, data, [*own, *student_of(change, seed, args.steps)], shared)
            measured[name] = _against_monolith(metrics(trained(run, [STUDENT])))
            measured[name]["flops"] = flops(run, STUDENT) / flops(run, MONOLITH)
    if "replay" in args.measure:
        every = [*own[:-1], f"evaluate.strategies=[{', '.join(ROUTED)}]"]
        real = variant(base, folder / "real", data, every, (*experts, ROUTER))
        images = real.require(Artifact("rows")).info["rows_train"]
        replayed = variant(base, folder / "replayed", data, [*every, f"router.replay={images}"], experts)
        for cluster in range(len(experts)):
            make_replay(replayed, cluster, serial)
        for name, run in {"rows": real, "samples": trained(replayed, [ROUTER])}.items():
            evaluated = metrics(run)
            measured[f"router of {name}"] = {
                row["model"]: row["frechet"] for row in evaluated["models"] if row["model"] in ROUTED
            }
            measured[f"router of {name}"]["accuracy"] = evaluated["router"]["accuracy"]
    return measured


def _against_monolith(evaluated: dict[str, Any]) -> dict[str, float]:
    """Ratios of the student's distance and held-out loss, and of `once`'s distance, to the monolith's."""
    distance = {row["model"]: row["frechet"] for row in evaluated["models"]}
    loss = {row["model"]: row["loss"] for row in evaluated["heldout_loss"]}
    ratios = {name: distance[name] / distance["monolith"] for name in ("student", "once")}
    if "student" in loss:
        ratios["loss"] = loss["student"] / loss["monolith"]
    return ratios


def tell(report: Report, data: str, measured: list[dict[str, Any]]) -> None:
    """Claims of a data set, over its seeds."""
    for number, name in enumerate(measured[0]):
        for what in measured[0][name]:
            if what == "once" and number and "router" not in name:
                continue  # the same experts' in every setting
            values = [each[name][what] for each in measured]
            over = "" if "router" in name else " over the monolith's"
            spread = f"({min(values):.3g} to {max(values):.3g})" if len(values) > 1 else ""
            target = 1.0 if what == "student" and "router" not in name else None
            report.add(Claim(f"{data}, {name}: {what}{over}", statistics.mean(values), spread, target))


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("--measure", nargs="+", default=MEASURES, choices=MEASURES)
    parser.add_argument("--data", nargs="+", default=list(BY_NAME), choices=list(BY_NAME))
    parser.add_argument("--folder", type=Path, help="keeps the runs, to go on from; a temporary one where not given")
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS), metavar="NAME")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--jobs", type=int, default=2, help="data sets and seeds at once, each by one thread")
    parser.add_argument("--only", nargs=2, metavar=("DATA", "SEED"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.seeds, args.steps, args.settings = 1, min(args.steps, 60), QUICK_SETTINGS
    if args.only:
        data, seed = BY_NAME[args.only[0]], int(args.only[1])
        print(json.dumps(one_seed(data, args.folder / data.name / str(seed), seed, args)))
        return
    report = Report("cpu")
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.folder or Path(temporary)).resolve()
        command = [sys.executable, *sys.argv, "--folder", str(folder), "--only"]

        def run(pair: tuple[str, int]) -> dict[str, Any]:
            process = subprocess.run([*command, pair[0], str(pair[1])], stdout=subprocess.PIPE, check=True, text=True)
            report.progress(f"{pair[0]}, seed {pair[1]}: done")
            measured: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
            return measured

        pairs = [(data, seed) for data in args.data for seed in range(args.seeds)]
        with ThreadPoolExecutor(args.jobs) as pool:
            measured = dict(zip(pairs, pool.map(run, pairs), strict=True))
    for data in args.data:
        tell(report, data, [measured[data, seed] for seed in range(args.seeds)])
    report.finish(args.json)


if __name__ == "__main__":
    main()
