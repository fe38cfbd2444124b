"""Evaluation at size: its peak memory by the number of samples, kill -9 in the middle, and what sampling costs beside
a plain loop.

Memory: two evaluations of one run of small untrained networks, in a process each, of `--few` and of `--many` samples.
Kill: a third one like the second, killed three times as it samples; then its figures are those of the second.
Rows: evaluations of few samples beside `--few-rows` and `--many-rows` real ones.
Loop: the sampling stage by one thread against a loop that samples the same images in batches and keeps none.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from claims import Claim, Report, interleaved, measuring, median_and_spread  # noqa: E402

from ddm_ray.data.sharded.serial import SideBySide  # noqa: E402
from ddm_ray.data.sharded.stage import ShareReporter, make_chunks  # noqa: E402
from ddm_ray.data.sharded.work import read_whole  # noqa: E402
from ddm_ray.evaluate.candidates import Lineup  # noqa: E402
from ddm_ray.evaluate.real_rows import prompts_of  # noqa: E402
from ddm_ray.evaluate.run import read_metrics  # noqa: E402
from ddm_ray.evaluate.samples import (  # noqa: E402
    BATCH,
    MakeSamples,
    SamplesPlan,
    SamplesRecord,
    SamplesStore,
    one_thread,
    portions,
    request_of,
)
from ddm_ray.run.chunk_records import recorded_keys  # noqa: E402
from ddm_ray.run.graph import evaluation  # noqa: E402
from ddm_ray.run.run import Run  # noqa: E402
from tests.random_run import make_run  # noqa: E402

MEASURES = ("memory", "rows", "loop")
SIZES = {"few": 5000, "many": 50_000, "few_rows": 20_000, "many_rows": 1_000_000, "looped": 10_000, "rounds": 5}
QUICK = {"few": 1000, "many": 4000, "few_rows": 2000, "many_rows": 20_000, "looped": 2000, "rounds": 2}
NAME = "demo"
CHEAP, USUAL = "sample={solver: euler, steps: 2}", "sample={solver: ab2, steps: 25}"
# What is asked for: memory of many over that of few, and time of the stage over that of a loop.
MOST_MEMORY, MOST_TIME = 1.2, 1 / 0.95
EVALUATE = """
import sys
from ddm_ray.evaluate.run import evaluate
from ddm_ray.memory import taken_bytes
from ddm_ray.run.run import Run
evaluate(Run.open(sys.argv[1]))
print(taken_bytes("VmHWM"))
"""


def made(folder: Path, samples: int, sample: str = CHEAP, rows: int = 1797, files: int = 1) -> Run:
    settings = ["evaluate.strategies=[once, top-1]", f"evaluate.num_samples={samples}", sample]
    settings.append(f"evaluate.real_rows={rows}")
    return make_run(str(folder), settings=tuple(settings), num_rows=rows, num_files=files)


def begin(run: Run) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", EVALUATE, run.url], cwd=ROOT, stdout=subprocess.PIPE, text=True)


def peak(run: Run) -> int:
    """Bytes that an evaluation takes at most, to its end."""
    process = begin(run)
    text, _ = process.communicate()
    assert process.returncode == 0
    return int(text)


def figures(run: Run) -> dict[str, Any]:
    """All metrics but the seconds."""
    metrics = read_metrics(run, NAME)
    for row in metrics["models"]:
        del row["seconds_per_image"]
    return metrics


def measure_memory(args: argparse.Namespace, folder: Path, report: Report) -> None:
    """Peak memory, and figures after kills."""
    sizes = {"few": args.few, "many": args.many, "killed": args.many}
    few, many, killed = (made(folder / name, number) for name, number in sizes.items())
    peaks = [peak(few), peak(many)]
    for number, bytes_ in zip((args.few, args.many), peaks, strict=True):
        report.add(Claim(f"peak memory, {number} samples a model", bytes_ / 2**20, "MiB"))
    report.add(Claim(f"peak memory of {args.many} over {args.few} samples", peaks[1] / peaks[0], "x", MOST_MEMORY))
    portions_made, total = 0, 3 * -(-args.many // BATCH)
    for kill in range(3):
        process, least = begin(killed), (kill + 1) * total // 5
        while portions_made < least and process.poll() is None:
            time.sleep(0.05)
            portions_made = len(recorded_keys(killed.store, evaluation(NAME)))
        assert process.poll() is None, "it ended before it was killed"
        process.kill()
        process.wait()
        report.progress(f"killed with {portions_made} of {total} portions")
    peak(killed)
    same = json.dumps(figures(killed)) == json.dumps(figures(many))
    report.add(Claim("other figures after three kills", float(not same), "", 0))


def measure_rows(args: argparse.Namespace, folder: Path, report: Report) -> None:
    """Peak memory by the number of real rows, digits again and again, and the time that they take once and again."""
    for number in (args.few_rows, args.many_rows):
        run = made(folder / f"rows-{number}", args.few, rows=number, files=max(1, number // 20_000))
        first, began = peak(run), time.perf_counter()
        report.add(Claim(f"peak memory beside {number} real rows", first / 2**20, "MiB"))
        run.store.delete(evaluation(NAME))
        peak(run)
        report.add(Claim(f"evaluated again beside {number} real rows", time.perf_counter() - began, "s"))


def measure_loop(args: argparse.Namespace, folder: Path, report: Report) -> None:
    """The sampling stage, its files included, against a plain loop."""
    run = made(folder / "looped", args.looped, USUAL)
    artifact = evaluation(NAME)
    identity = run.identity(artifact)
    lineup = Lineup.of(run, identity.inputs, {}, "cpu", {})
    once = next(candidate for candidate in lineup.candidates if candidate.name == "once")
    labels = [number % 10 for number in range(args.looped)]
    request = request_of(run.config, prompts_of(run), labels).changed(strategy="once")

    def loop() -> None:
        for first in range(0, args.looped, BATCH):
            once.models.sample(request.rows(slice(first, first + BATCH)))

    def stage() -> None:
        run.store.delete(artifact)
        chunks = SamplesStore(run, artifact, SamplesPlan, SamplesRecord)
        plan = chunks.plan(lambda: SamplesPlan(portions([once], labels), tuple(identity.inputs)))
        maker = MakeSamples(chunks, identity, "cpu", lineup)
        observer = ShareReporter[SamplesRecord](plan.units, lambda *_: None, "sampling")
        make_chunks(chunks, plan, SideBySide(1), read_whole, maker, observer)

    with one_thread():
        seconds = interleaved({"stage": stage, "loop": loop}, args.rounds, "cpu")
    ratio, spread = median_and_spread([a / b for a, b in zip(seconds["stage"], seconds["loop"], strict=True)])
    report.add(Claim("sampling stage over a plain loop, one thread", ratio, "x", MOST_TIME, spread))


def main() -> None:
    args = measuring(__doc__, MEASURES, SIZES, QUICK)
    report = Report("cpu")
    with tempfile.TemporaryDirectory(prefix="ddm-evaluation-") as name:
        folder = Path(args.folder or name)
        for measure in args.measure:
            {"memory": measure_memory, "rows": measure_rows, "loop": measure_loop}[measure](args, folder, report)
    report.finish(args.json)


if __name__ == "__main__":
    main()
