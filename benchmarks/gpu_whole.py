"""Phases of gpu.py about the whole: photographs become rows; an expert is trained, killed and gone on with. No Ray."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from claims import TRAIN
from gpu_sample import jpeg, saved_embedder
from gpu_train import world
from safetensors.torch import load

from ddm_ray.config import load_recipe
from ddm_ray.data.partition.stage import partition
from ddm_ray.data.prepare.stage import prepare
from ddm_ray.data.sharded.serial import SideBySide, serial
from ddm_ray.jobs.attempts import Attempt, saved_states
from ddm_ray.placement import PreparePlacement, TrainPlacement
from ddm_ray.run.graph import Artifact, expert
from ddm_ray.run.run import Run
from ddm_ray.train import worker

if TYPE_CHECKING:
    from gpu import Asked

ROOT = Path(__file__).parents[1]
EXPERT, PATIENCE_SECONDS = expert(0), 200.0
TINY_TRAIN = "expert.train={steps: 40, batch: 8, learning_rate: 1.0e-3, warmup_steps: 0, ema_decay: 0.9}"
TRAIN_XL = "expert.train={steps: 400, batch: 128, learning_rate: 2.0e-4, ema_decay: 0.99, precision: bf16}"


def rows(asked: "Asked") -> None:
    """Photographs become rows as one process prepares them, which decodes them, too."""
    count, side = (24, 32) if asked.tiny else (4000, 256)
    with tempfile.TemporaryDirectory() as folder:
        photos = Path(folder) / "photos"
        for number in range(count):
            path = photos / f"{'ab'[number % 2]}/{number:05d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(jpeg(number))
        name, image_size, file = saved_embedder(asked, Path(folder))
        settings = (
            f"data={{source: '{photos}', image_size: {side}, channels: 3, num_classes: 2, heldout: 0.1}}",
            f"embedder={{kind: timm, model: {name}, checkpoint: '{file}', image_size: {image_size}, batch_size: 64}}",
        )
        run = Run.create(f"{folder}/run", load_recipe("images64", settings))
        placement, began = PreparePlacement(use_gpu=asked.device == "cuda"), time.perf_counter()
        prepare(run, placement=placement, chunk_rows=max(count // 16, 8), execute=SideBySide(os.cpu_count() or 1))
        asked.tell(f"photographs to rows of {side} x {side}", count / (time.perf_counter() - began), "images/s")


def jobs(asked: "Asked") -> None:
    """An expert by the whole loop, killed once: seconds until it steps again, and its losses beside the unkilled's.

    On a GPU these have a try to compile, whose code the unkilled one has left below the cache.
    """
    data = "data={source: 'shapes:%d', image_size: %d, channels: 3, num_classes: 12, heldout: 0.1}"
    size, network = (200, 16), "expert.model={patch_size: 4, width: 32, depth: 2, heads: 2}"
    if not asked.tiny:
        size, network = (4000, 32), "expert.model={size: S, patch_size: 2}"
    settings = (
        data % size,
        "embedder={kind: pixels, dim: 16}",
        "partition={num_clusters: 2, num_fine: 16}",
        network,
        TINY_TRAIN if asked.tiny else TRAIN_XL,
    )
    states = 10 if asked.tiny else 50
    placement = TrainPlacement(checkpoint_steps=states, checkpoint_minutes=0, cache=str(asked.out / "cache"))
    with tempfile.TemporaryDirectory() as folder:
        unkilled = Run.create(f"{folder}/unkilled", load_recipe("digits", settings))
        prepare(unkilled, execute=serial)
        partition(unkilled, with_report=False)
        killed = Run.open(shutil.copytree(unkilled.url, f"{folder}/killed"))
        began = time.perf_counter()
        with world():
            worker.train(unkilled.url, EXPERT, placement)
        asked.tell("unkilled, with all starts", time.perf_counter() - began, "s")
        _killed_once(asked, killed, placement)
        curves = [_losses(run) for run in (unkilled, killed)]
        apart = float(((curves[0] - curves[1]).abs() / curves[0].abs()).max())
        asked.tell("losses of the killed from the unkilled, at most", apart, "relative", "<= 0.02")


def _killed_once(asked: "Asked", run: Run, placement: TrainPlacement) -> None:
    """Train in a process that is killed once there is a state, and in another one to the end."""
    first = _process(run, placement, asked.out / "first.log")
    _await(first, lambda: bool(list(saved_states(run.store, EXPERT))))
    first.send_signal(signal.SIGKILL)
    first.wait()
    began = time.perf_counter()
    second = _process(run, placement, asked.out / "second.log")
    attempt = Attempt(run.store, EXPERT, 2)
    for phase, most in (("starting", ""), ("training", "<= 30")):
        _await(second, partial(_is_in, attempt, (phase, "training")))
        asked.tell(f"from a new process to {phase}", time.perf_counter() - began, "s", "" if asked.tiny else most)
    why = attempt.last_beat().get("uncompiled", "")
    asked.tell("reasons to train uncompiled", int(bool(why)), "", "<= 0")
    asked.tell("which is", why)
    asked.tell("the second one's exit status", second.wait(PATIENCE_SECONDS), "", "<= 0")
    asked.tell("rows a second, lastly", attempt.last_beat().get("samples_per_second"))


def _is_in(attempt: Attempt, phases: tuple[str, ...]) -> bool:
    return attempt.last_beat().get("phase") in phases


def _process(run: Run, placement: TrainPlacement, log: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-c", TRAIN, run.url, placement.model_dump_json(), EXPERT]
    with log.open("wb") as file:
        return subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)


def _await(process: "subprocess.Popen[bytes]", holds: Callable[[], bool]) -> None:
    """Wait until something holds, while the process lives."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        with suppress(FileNotFoundError):
            if holds():
                return
        if process.poll() is not None:
            raise RuntimeError(f"training ended by itself, exit status {process.returncode}")
        time.sleep(0.02)
    raise RuntimeError(f"nothing came of the training in {PATIENCE_SECONDS:g} s")


def _losses(run: Run, artifact: Artifact = EXPERT) -> torch.Tensor:
    return load(run.read(artifact, f"{run.require(artifact).info['weights']}/curve.safetensors"))["loss"]
