"""Does it beat the monolith? A study by its plan: each arm of each seed trained, sampled, measured, and put together.

A plan (`study/plans/`) is written down before it runs: data, budgets, seeds, strategies, arms. All is done by the
product itself, without Ray: a job a tiny expert would cost more than its training. Killed, the same command goes on
with the same `--folder`: what is trained, and each measured arm, is kept. `study/measured/` keeps what was measured,
arm by arm: what is there isn't measured again, on any machine.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pydantic import ValidationError

sys.path.insert(1, str(Path(__file__).parents[1]))
sys.path.insert(1, str(Path(__file__).parents[1] / "benchmarks"))

from claims import commit, machine

from science_arms import Measuring, Ruler, result_path, write_result
from science_page import MEASURED, Study, table
from science_plan import PLANS, Plan

RULER, QUICK = "ruler", "quick"


def one(plan: Plan, folder: Path, seed: int, arm: str, device: str) -> None:
    """Measure one arm of a seed, or make the ruler."""
    ruler, began = Ruler.of(plan, folder, device), time.monotonic()
    result = ruler.floor(plan.num_samples) if arm == RULER else Measuring.of(plan, folder, seed, ruler).measure(arm)
    result |= {"minutes": (time.monotonic() - began) / 60, "commit": commit(), "machine": machine(device)}
    result["plan"] = plan.digest(arm)
    write_result(result_path(folder, seed, arm), result)


def gathered(plan: Plan, folder: Path) -> dict[str, Any]:
    """All that was measured of a study by now, with its plan."""
    read = {
        str(seed): {
            arm: _read(plan, folder, seed, arm) for arm in plan.arms_of(seed) if result_path(folder, seed, arm).exists()
        }
        for seed in (*plan.seeds.choosing, *plan.seeds.reported)
    }
    real = _read(plan, folder, plan.seeds.reported[0], RULER)
    return {"plan": plan.model_dump(mode="json"), "real": real, "seeds": read}


def known(plan: Plan, folder: Path, results: Path) -> None:
    """Put what files of results have of this plan into a study's folder."""
    for path in (results, partial(results)):
        if path.exists():
            _put(plan, folder, json.loads(path.read_text())["seeds"])


def partial(results: Path) -> Path:
    """The file of results by now, until they are a whole study's."""
    return results.with_suffix(".partial.json")


def _put(plan: Plan, folder: Path, seeds: Mapping[str, Mapping[str, dict[str, Any]]]) -> None:
    for seed in (*plan.seeds.choosing, *plan.seeds.reported):
        for arm in plan.arms_of(seed):
            result, own = seeds.get(str(seed), {}).get(arm, {}), result_path(folder, seed, arm)
            if result.get("plan") == plan.digest(arm) and not own.exists():
                write_result(own, result)


def _read(plan: Plan, folder: Path, seed: int, arm: str) -> dict[str, Any]:
    """The result of an arm, which has to be of this plan."""
    path = result_path(folder, seed, arm)
    result: dict[str, Any] = json.loads(path.read_text())
    if result["plan"] != plan.digest(arm):
        raise SystemExit(f"{path}: was measured by another plan; delete it, and {path.parents[2] / str(seed) / arm}")
    return result


def study(plan: Plan, source: str, folder: Path, jobs: int, results: Path | None, device: str) -> dict[str, Any]:
    """Measure all that isn't yet of a study, `jobs` seeds at once; `source`: the plan's name or file.

    `results`: a file for them all in the end; one beside it has each arm as soon as it is measured.
    """
    command = [sys.executable, __file__, source, "--folder", str(folder), "--device", device, "--only"]
    environment, one_by_one = os.environ | {"OMP_NUM_THREADS": "1"}, threading.Lock()

    def measure(seed: int, arm: str) -> None:
        path = result_path(folder, seed, arm)
        if path.exists():
            _read(plan, folder, seed, arm)
        elif subprocess.run([*command, str(seed), arm], env=environment).returncode:
            raise SystemExit(f"{plan.name}, seed {seed}: {arm} failed; once it is mended the same command goes on")
        print(f"{plan.name}, seed {seed}: {arm}", file=sys.stderr, flush=True)
        with one_by_one:
            if results is not None:
                write_result(partial(results), gathered(plan, folder))

    def measure_all(seed: int) -> None:
        for arm in plan.arms_of(seed):  # a base before what is made of it
            measure(seed, arm)

    if results is not None:
        known(plan, folder, results)
    seeds = (*plan.seeds.reported, *plan.seeds.choosing)
    measure(seeds[0], RULER)
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(measure_all, seeds))
    if results is not None:
        write_result(results, gathered(plan, folder))
        partial(results).unlink()
    return gathered(plan, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = sorted(path.stem for path in PLANS.glob("*.yaml") if path.stem != QUICK)
    of_gpu = sorted(f"gpu/{path.stem}" for path in PLANS.glob("gpu/*.yaml"))
    parser.add_argument(
        "plans",
        nargs="*",
        metavar="PLAN",
        help=f"{', '.join(names)}, or a .yaml file; default: these. With --device cuda: {', '.join(of_gpu)}",
    )
    parser.add_argument("--quick", action="store_true", help="one seed of everything, for a look: minutes")
    parser.add_argument("--folder", type=Path, help="keeps the runs, to go on from; a temporary one where not given")
    parser.add_argument("--jobs", type=int, help="seeds at once; none: one a core, or one on an accelerator")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="where all of it is computed")
    parser.add_argument(
        "--results", type=Path, help="folder for a JSON file a study; none: study/measured, or --quick: none"
    )
    parser.add_argument("--only", nargs=2, metavar=("SEED", "ARM"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    sources = [QUICK] if args.quick else args.plans or names
    if args.only:
        one(Plan.read(sources[0]), args.folder, int(args.only[0]), args.only[1], args.device)
        return
    jobs = args.jobs or (len(os.sched_getaffinity(0)) if args.device == "cpu" else 1)
    results = args.results or (None if args.quick else MEASURED)
    try:
        plans = {source: Plan.read(source) for source in sources}
    except (FileNotFoundError, ValidationError) as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory(prefix="ddm-science-") as temporary:
        for source, plan in plans.items():
            folder = (args.folder or Path(temporary)).resolve() / plan.name
            path = None if results is None else results / f"{plan.name}.json"
            measured = study(plan, source, folder, jobs, path, args.device)
            print(f"{plan.question}\n\n{table(Study(measured))}\n", flush=True)


if __name__ == "__main__":
    main()
