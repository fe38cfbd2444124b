"""THE training loop: every rank of every job runs `train`, with or without Ray around it."""

import math
import os
import time
from collections import deque

import torch
import torch.distributed as dist

from ddm_ray.data.loader import Loader
from ddm_ray.errors import TrainingError
from ddm_ray.placement import Placement
from ddm_ray.storage.run import Run
from ddm_ray.train import attempt as trying
from ddm_ray.train import state
from ddm_ray.train.batches import RankBatches
from ddm_ray.train.engine import Engine
from ddm_ray.train.job import TrainJob, train_job

BEAT_SECONDS = 1.0


def train(run_url: str, artifact: str, placement: Placement) -> None:
    """Train `artifact` to its last step and commit it. Every rank of the torch.distributed world calls this.

    Goes on from the newest verified state of any earlier attempt. Raises TrainingError for a gradient that isn't
    finite, CorruptArtifact or MissingArtifact for its rows, DriftError for a job begun under another configuration.
    """
    torch.set_num_threads(placement.threads)
    run = Run.open(run_url)
    if run.finished(artifact):
        return
    job = train_job(run, artifact)
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    with Loader(run, job.shards, job.train.seed, job.batch, placement.rows_gib, placement.cache, ranks_here) as loader:
        batches = RankBatches(job, loader, dist.get_rank(), dist.get_world_size(), placement.micro_batch)
        _train(run, job, batches, placement)


def _train(run: Run, job: TrainJob, batches: RankBatches, placement: Placement) -> None:
    model = job.build()
    attempt = trying.begin(run, job.artifact)
    saved = trying.load_saved(attempt, model)
    engine = Engine(model, job.train, placement, batches.accumulation)
    if saved:
        state.restore(engine, saved.tensors, saved.step)
    first, seconds_before = (saved.step, saved.seconds) if saved else (0, 0.0)
    losses = deque(saved.losses if saved else [], maxlen=100)

    began = beat_at = time.monotonic()
    beat_step = first
    for step in range(first, job.train.steps):
        loss = 0.0
        for batch, weight_B in batches.at(step, engine.device):
            with engine.autocast():
                part = (job.objective(engine.model, batch) * weight_B).sum()
            engine.backward(part)
            loss += float(part.detach())
        norm = engine.step(step)
        if not math.isfinite(norm):
            raise TrainingError(f"gradient norm {norm} at step {step}; begin a run with a lower learning_rate")
        losses.append(loss)

        done, now = step + 1, time.monotonic()
        if now - beat_at >= BEAT_SECONDS or done in (first + 1, job.train.steps):
            rate = (done - beat_step) / max(now - beat_at, 1e-9)
            attempt.beat(done, job.train.steps, sum(losses) / len(losses), rate)
            beat_at, beat_step = now, done
        if done % placement.checkpoint_steps == 0 and done < job.train.steps:
            attempt.save(done, state.gather(engine), seconds_before + now - began, list(losses))
    seconds = seconds_before + time.monotonic() - began
    attempt.publish(job, state.gather(engine), sum(losses) / max(len(losses), 1), seconds)
    dist.barrier()
