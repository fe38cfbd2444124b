"""What train.py compares as processes of their own: jobs through the whole stack, and a loop of the engine alone.

Each script of train_*.py prints a JSON object as its last line. B rows, N rows in memory.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddm_ray.run.graph import Artifact

SCRIPTS = Path(__file__).parent
LOOK_SECONDS = 0.2
READY = "training"
"""What a side prints once its jobs train."""
Beat = tuple[float, int, float]
"""When it was seen (the machine's clock), steps done, CPU seconds so far."""


class Watched:
    """Beats of jobs as storage tells them, looked at by a thread until the block ends; READY is printed."""

    def __init__(self, url: str, artifacts: Sequence[str]):
        self.beats: dict[str, list[Beat]] = {artifact: [] for artifact in artifacts}
        self._url, self._over = url, threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> "Watched":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        from ddm_ray.jobs.attempts import heartbeat
        from ddm_ray.run.run import Run

        store, ready = Run.open(self._url).store, False
        while not self._over.wait(LOOK_SECONDS):
            for artifact, beats in self.beats.items():
                beat = heartbeat(store, artifact)
                if beat and beat["phase"] == "training" and (not beats or beat["step"] > beats[-1][1]):
                    with suppress(FileNotFoundError):  # it has just ended
                        beats.append((time.monotonic(), beat["step"], cpu_seconds(beat["pid"])))
            if not ready and (ready := all(self.beats.values())):
                print(READY, flush=True)


def cpu_seconds(pid: int) -> float:
    """What all threads of a process took so far; of it alone, for looking at all would cost what is measured."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run_stack(url: str, checkpoint_steps: int, *artifacts: Artifact) -> None:
    """Train artifacts at once as `ddm train` does, on a private Ray."""
    from ddm_ray.placement import TrainPlacement
    from ddm_ray.ray_session import ray_session
    from ddm_ray.run.run import Run
    from ddm_ray.train.ray.train_all import train_all

    with ray_session("local"), Watched(url, artifacts) as watched:
        train_all(Run.open(url), list(artifacts), TrainPlacement(checkpoint_steps=checkpoint_steps))
    print(json.dumps({"beats": watched.beats}))


def run_loop(url: str, artifact: Artifact) -> None:
    """As many steps of the same engine, model and objective on rows in memory, and nothing else."""
    import torch

    from ddm_ray.data.loading.loader import load_rows
    from ddm_ray.placement import TrainPlacement
    from ddm_ray.run.run import Run
    from ddm_ray.train import local
    from ddm_ray.train.engine import Engine
    from ddm_ray.train.job import train_job
    from ddm_ray.train.objectives import Batch

    torch.set_num_threads(1)
    run = Run.open(url)
    job = train_job(run, artifact)
    rows = load_rows(run, job.shards)
    beats: list[Beat] = []
    with local.world():
        engine = Engine(job.build(), job.train, TrainPlacement())
        told_at = time.monotonic()
        for step in range(1, job.train.steps + 1):
            row_B = torch.randint(len(rows), (job.batch,))
            noise_BCHW, t_B = torch.randn(job.batch, *job.image_shape), torch.rand(job.batch)
            label_B = rows.label_N[row_B].masked_fill(torch.rand(job.batch) < job.train.condition_dropout, 10)
            batch = Batch(rows.data_NCHW[row_B], noise_BCHW, t_B, label_B, rows.cluster_N[row_B])
            engine.backward(job.objective(engine.model, batch).mean())
            engine.step(job.train.learning_rate)
            now = time.monotonic()
            if now - told_at >= 1:
                if not beats:
                    print(READY, flush=True)
                beats.append((now, step, time.process_time()))
                told_at = now
    print(json.dumps({"beats": {artifact: beats}}))


def start(
    script: str, *arguments: object, keep_memory: bool = False, environment: Mapping[str, str] | None = None
) -> "subprocess.Popen[str]":
    """A script beside this one as a fresh process with one thread for mathematics.

    `keep_memory`: with the settings of glibc that a training worker has. `environment`: more variables.
    """
    from ddm_ray.memory import KEEP_FREED_MEMORY

    settings = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    settings |= {"PYTHONPATH": os.pathsep.join(filter(None, [str(SCRIPTS.parent), os.environ.get("PYTHONPATH")]))}
    kept = {name: value for name, value in os.environ.items() if name not in {"RAY_ADDRESS", *KEEP_FREED_MEMORY}}
    settings |= (KEEP_FREED_MEMORY if keep_memory else {}) | dict(environment or {})
    command = [sys.executable, str(SCRIPTS / f"{script}.py"), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=kept | settings)


def finish(process: "subprocess.Popen[str]") -> Any:
    """The object that a script printed. Raises RuntimeError if it failed; its own words are on standard error."""
    assert process.stdout
    printed = process.stdout.read()
    if process.wait():
        raise RuntimeError(f"{process.args} failed")
    return json.loads(printed.splitlines()[-1])


if __name__ == "__main__":
    name, url, *more = sys.argv[1:]
    if name == "stack":
        run_stack(url, int(more[0]), *map(Artifact, more[1:]))
    else:
        run_loop(url, *map(Artifact, more))
