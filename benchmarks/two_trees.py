"""How long stages take in this tree and in that of another commit, by processes of their own, in turns.

    python benchmarks/two_trees.py --before COMMIT [--repeats N] [--measure prepare photos ...] [--json PATH]

Each tree runs its own copy of this script, since names differ. A measure must do the same work in both.

prepare: 4,000 small images drawn as PNG; photos: 200 JPEGs of 2 megapixels; loader: batches of a shard whose row groups
are read again and again; state: training states of 64 MiB, of which two are kept; start: a training of one step, from
the beginning of its process; steps: one of 300 steps of a DiT of width 128; host: processor seconds of 100 steps of 28
blocks too narrow to take any, which is what issuing a step costs. A ratio is the median of this tree's times over that
of the other's.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from claims import Claim, Report, options

ROOT = Path(__file__).parents[1]
MEASURES = ("prepare", "photos", "loader", "state", "start", "command", "steps", "host")
BOUNDS = {"command": 1.25}
BOUND = 1.03
POLL_SECONDS = 0.02


def prepare(folder: Path, source: str, settings: tuple[str, ...] = ()) -> float:
    """Seconds of the stage in this process."""
    from ddm_ray.config import load_recipe
    from ddm_ray.data.prepare.stage import prepare as stage
    from ddm_ray.data.sharded.serial import serial
    from ddm_ray.run.run import Run

    run = Run.create(str(folder / "run"), load_recipe("tiny", (f"data.source={source}", *settings)))
    began = time.perf_counter()
    stage(run, execute=serial)
    return time.perf_counter() - began


def photos(folder: Path) -> float:
    """Seconds of the stage, of photographs drawn once a process."""
    import numpy as np
    from PIL import Image

    random = np.random.default_rng(0)
    (folder / "photos/a").mkdir(parents=True)
    pixels = Image.fromarray(random.integers(0, 256, (30, 40, 3), np.uint8)).resize((1600, 1200))
    for number in range(200):
        pixels.rotate(number).save(folder / f"photos/a/{number}.jpg", quality=90)
    settings = ("data.image_size=64", "data.channels=3", "data.class_names=[a]", "embedder.dim=8")
    return prepare(folder, str(folder / "photos"), settings)


def loader(folder: Path) -> float:
    """Seconds of 5,000 batches, most of whose rows are read from the shard."""
    import torch

    from ddm_ray.data.loading.loader import Loader
    from ddm_ray.run.graph import shard
    from tests.random_run import make_data

    run = make_data(str(folder / "run"), num_rows=60_000, row_group_rows=8192)
    with Loader(run, (shard(0),), 0, 64, rows_gib=1e-4, window_bytes=2**20) as rows:
        began = time.perf_counter()
        for step in range(5000):
            rows.batch(step, torch.arange(64))
        return time.perf_counter() - began


def state(folder: Path) -> float:
    """Seconds of six states, written as training writes them."""
    from ddm_ray.jobs.attempts import claim
    from ddm_ray.run.info import StateInfo
    from ddm_ray.run.manifest import FileRecord, Identity
    from ddm_ray.store.store import Store

    attempt, data = claim(Store(str(folder)), "experts/000"), os.urandom(64 * 2**20)
    began = time.perf_counter()
    for step in range(6):
        attempt.store.write(f"{attempt.state_prefix(step)}/a.safetensors", data)
        records = {"a.safetensors": FileRecord.of(data)}
        attempt.commit_state(step, Identity({}), records, StateInfo(step=step, seconds=1.0, world_size=1))
        attempt.drop_states(2)
    return time.perf_counter() - began


def start(folder: Path) -> float:
    """Seconds of a training of one step."""
    return _training(folder, ("expert.train.steps=1",))


def command(folder: Path) -> float:
    """Seconds of `ddm train` until its first step is done, by its heartbeat."""
    from tests.random_run import make_data

    url = make_data(str(folder / "run"), settings=("expert.train.steps=1000000", "expert.train.batch=6")).url
    heartbeat = Path(url) / "experts/000/attempts/0001/HEARTBEAT"
    began = time.perf_counter()
    train = [sys.executable, "-c", "from ddm_ray.cli import main; main()", "train", url, "expert", "0"]
    process = subprocess.Popen(train, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while process.poll() is None:
            with suppress(FileNotFoundError, ValueError):  # not there, or half of it
                if json.loads(heartbeat.read_bytes()).get("step", 0) >= 1:
                    return time.perf_counter() - began
            time.sleep(POLL_SECONDS)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()
    raise RuntimeError(f"ddm train ended with {process.returncode}")


def steps(folder: Path) -> float:
    """Seconds of a training of 300 steps."""
    model = "expert.model={patch_size: 2, width: 128, depth: 4, heads: 4}"
    return _training(folder, ("expert.train.steps=300", "expert.train.batch=32", model))


def host(folder: Path) -> float:
    """Processor seconds of this process' first thread for 100 steps through the engine, in bf16."""
    import torch

    from ddm_ray import placement
    from ddm_ray.config import TrainConfig
    from ddm_ray.core.flow import Flow
    from ddm_ray.models.dit import DiT
    from ddm_ray.train.engine import Engine
    from ddm_ray.train.objectives import Batch, ExpertLoss

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    train = TrainConfig.model_validate({"steps": 1, "batch": 2, "precision": "bf16"})
    size = {"image_size": 4, "channels": 1, "num_classes": 10, "patch_size": 2, "width": 16, "depth": 28, "heads": 2}
    engine = Engine(DiT(**size), train, placement.TrainPlacement())
    x_BCHW, label_B = torch.randn(2, 1, 4, 4), torch.zeros(2, dtype=torch.int64)
    batch, weight_B = Batch(x_BCHW, x_BCHW.clone(), torch.rand(2), label_B, label_B), torch.full((2,), 0.5)
    for step in range(110):
        if step == 10:
            began = time.thread_time()
        engine.accumulate(ExpertLoss(Flow()), [(batch, weight_B)])
        engine.step(1e-4)
    return time.thread_time() - began


def _training(folder: Path, settings: tuple[str, ...]) -> float:
    began = time.perf_counter()
    from ddm_ray.run.graph import expert
    from ddm_ray.train import local
    from tests.random_run import make_data

    url = make_data(str(folder / "run"), settings=settings).url
    local.train_locally(url, [expert(0)])
    return time.perf_counter() - began


def measure(name: str) -> None:
    """Print the seconds of one measure, by the tree that is first in the path."""
    with tempfile.TemporaryDirectory() as folder:
        if name == "prepare":
            print(
                prepare(Path(folder), "shapes:4000", ("data.image_size=32", "data.channels=3", "data.num_classes=12"))
            )
        else:
            others = (photos, loader, state, start, command, steps, host)
            print(next(each for each in others if each.__name__ == name)(Path(folder)))


def main() -> None:
    parser = options(str(__doc__))
    parser.add_argument("--before", required=True, metavar="COMMIT", help="what to compare this tree with")
    parser.add_argument("--repeats", type=int, default=7, help="times that each side is measured")
    parser.add_argument("--measure", nargs="+", choices=MEASURES, default=MEASURES)
    arguments, report = parser.parse_args(), Report()
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / "tree"
        subprocess.run(["git", "worktree", "add", "-q", "--detach", other, arguments.before], cwd=ROOT, check=True)
        try:
            for name in arguments.measure:
                seconds: dict[Path, list[float]] = {ROOT: [], other: []}
                for turn in range(arguments.repeats):
                    for tree in sorted(seconds, reverse=bool(turn % 2)):
                        environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
                        side = [sys.executable, str(tree / "benchmarks/two_trees.py"), "--side", name]
                        done = subprocess.run(side, env=environment, cwd=tree, capture_output=True, text=True)
                        if done.returncode:
                            sys.exit(f"{tree}: {done.stderr[-2000:]}")
                        seconds[tree].append(float(done.stdout.split()[-1]))
                now, before = seconds[ROOT], seconds[other]
                ratio = statistics.median(now) / statistics.median(before)
                quarters = statistics.quantiles([a / b for a, b in zip(now, before, strict=True)], n=4)
                report.add(Claim(f"{name}: before", statistics.median(before), "s"))
                report.add(
                    Claim(
                        f"{name}: time", ratio, "x before", BOUNDS.get(name, BOUND), (quarters[2] - quarters[0]) / ratio
                    )
                )
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", other], cwd=ROOT, check=True)
    report.finish(arguments.json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--side"]:
        measure(sys.argv[2])
    else:
        main()
