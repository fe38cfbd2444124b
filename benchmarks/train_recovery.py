"""From the kill of a training worker to the next attempt's first step, by what it is spent on.

Times are those of files (claims, heartbeats) and of processes: nothing in what is measured knows of it.
As a script: `train_recovery.py kills URL KILLS`, which trains URL's first expert through the whole stack and kills its
worker again and again; `train_recovery.py parts URL`, what of a start can be done in a process by itself.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from claims import Claim, Report
from data_compute import add

from ddm_ray.run.graph import Artifact

ARTIFACT = Artifact("experts/000")
# Seconds, for 95 kills of 100.
MOST_SECONDS = 15.0
CHECKPOINT_STEPS = 20
LOADED = "import ddm_ray.train.worker; from ddm_ray.train.deepspeed_setup import load_deepspeed; load_deepspeed()"
PATIENCE_SECONDS = 180.0
POLL_SECONDS = 0.01


def kills(url: str, many: int) -> list[dict[str, float]]:
    """Seconds from each kill until there is a new process, until it claims an attempt, until its first step is done."""
    from ddm_ray.placement import TrainPlacement
    from ddm_ray.ray_session import ray_session
    from ddm_ray.run.run import Run
    from ddm_ray.train.ray.train_all import train_all

    run, recoveries = Run.open(url), []
    placement = TrainPlacement(checkpoint_steps=CHECKPOINT_STEPS, max_failures=10 * many)
    with ray_session("local"):
        training = threading.Thread(target=train_all, args=(run, [ARTIFACT], placement), daemon=True)
        training.start()
        for attempt in range(1, many + 1):
            beat = _until(lambda attempt=attempt: _trained(url, attempt), training)
            killed = time.time()
            os.kill(beat["pid"], signal.SIGKILL)
            recoveries.append(_recovery(url, attempt + 1, killed, training))
            print(f"kill {attempt}: {recoveries[-1]}", file=sys.stderr, flush=True)
        _until(lambda: _trained(url, many + 1), training)
    return recoveries


def _recovery(url: str, attempt: int, killed: float, training: threading.Thread) -> dict[str, float]:
    """What became of an attempt, in seconds since the kill of the one before."""
    claim = _path(url, attempt, "CLAIM")
    began = _until(lambda: _start_of(json.loads(claim.read_bytes())["pid"]), training)
    _until(lambda: _beat(url, attempt, "training"), training)
    stepped = _path(url, attempt, "HEARTBEAT").stat().st_mtime
    # A process that was there before the kill takes no time to start.
    parts = {"process": max(began, killed), "claim": claim.stat().st_mtime, "step": stepped}
    return {name: at - killed for name, at in parts.items()}


def _until(look: Callable[[], Any], training: threading.Thread) -> Any:
    """What `look` finds at last; what isn't there yet, or half of it, isn't found."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while training.is_alive() and time.monotonic() < deadline:
        with suppress(FileNotFoundError, ProcessLookupError, ValueError):
            if seen := look():
                return seen
        time.sleep(POLL_SECONDS)
    raise RuntimeError("training ended, or is stuck" if training.is_alive() else "training ended before the kills")


def _path(url: str, attempt: int, name: str) -> Path:
    return Path(url) / ARTIFACT / "attempts" / f"{attempt:04d}" / name


def _beat(url: str, attempt: int, phase: str) -> dict[str, Any] | None:
    heartbeat = json.loads(_path(url, attempt, "HEARTBEAT").read_bytes())
    return heartbeat if heartbeat["phase"] == phase else None


def _trained(url: str, attempt: int) -> dict[str, Any] | None:
    """Its heartbeat, once there surely is a state of its own."""
    heartbeat = _beat(url, attempt, "training")
    return heartbeat if heartbeat and heartbeat["step"] > heartbeat["first"] + 3 * CHECKPOINT_STEPS else None


def _start_of(process: int) -> float:
    """When a process began, seconds since 1970."""
    ticks = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
    age = float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def parts(url: str) -> dict[str, float]:
    """Seconds that a fresh process takes, alone, for what a worker does before its first step is done."""
    began = time.perf_counter()
    seconds: dict[str, float] = {}

    def done(name: str) -> None:
        nonlocal began
        seconds[name], began = time.perf_counter() - began, time.perf_counter()

    # In another one: this has loaded torch already.
    subprocess.run([sys.executable, "-c", LOADED], check=True)
    done("imports")
    import torch

    from ddm_ray.data.loading.loader import Loader
    from ddm_ray.placement import TrainPlacement
    from ddm_ray.run.run import Run
    from ddm_ray.train import local
    from ddm_ray.train.batches import RankBatches
    from ddm_ray.train.engine import Engine
    from ddm_ray.train.job import train_job
    from ddm_ray.train.membership import Membership
    from ddm_ray.train.resume import resume_training

    began = time.perf_counter()

    def build() -> Engine:
        began = time.perf_counter()
        engine = Engine(job.build(), job.train, TrainPlacement())
        seconds["engine"] = time.perf_counter() - began
        return engine

    torch.set_num_threads(1)
    run = Run.open(url)
    job = train_job(run, ARTIFACT)
    with local.world():
        done("process group")
        with Loader(run, job.shards, job.train.seed, job.batch) as loader:
            done("rows")
            with Membership(run, job, TrainPlacement()) as membership:
                engine, before = resume_training(membership, build, build)
                done("claim and state")
                seconds["claim and state"] -= seconds["engine"]
                batches = RankBatches(job, loader, 0, 1, membership.micro_batch)
                engine.accumulate(job.objective, batches.at(before.step, engine.device))
                engine.step(job.learning_rate(before.step))
                done("first step")
    return seconds


def tell(recoveries: Sequence[Mapping[str, float]], alone: Sequence[Mapping[str, float]], report: Report) -> None:
    """The claims, of all kills and of all fresh processes."""
    until_step = sorted(each["step"] for each in recoveries)
    slow = statistics.quantiles(until_step, n=20, method="inclusive")[-1] if len(until_step) > 1 else until_step[0]
    report.add(Claim(f"from kill to the next step, 95 % of {len(until_step)}", slow, "s", MOST_SECONDS))
    add(report, "from kill to the next step", until_step, "s")
    add(report, "of it until a new process", [each["process"] for each in recoveries], "s")
    add(report, "of it until it claims an attempt", [each["claim"] - each["process"] for each in recoveries], "s")
    add(report, "of it until its first step is done", [each["step"] - each["claim"] for each in recoveries], "s")
    for name in alone[0]:
        add(report, f"{name}, in a process by itself", [each[name] for each in alone], "s")


if __name__ == "__main__":
    kind, url, *more = sys.argv[1:]
    print(json.dumps(kills(url, int(more[0])) if kind == "kills" else parts(url)), flush=True)
    os._exit(0)  # a thread may still wait for what was killed
