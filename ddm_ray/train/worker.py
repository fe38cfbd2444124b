"""THE training loop: every rank of every job runs `train`, with or without Ray around it."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial

import torch
import torch.distributed as dist

from ddm_ray.data.loading.loader import Loader
from ddm_ray.data.text_encoding import StoredTexts
from ddm_ray.errors import ConfigError, CorruptArtifact, StorageError, TrainingError
from ddm_ray.jobs.attempts import claimed
from ddm_ray.jobs.launches import Launch
from ddm_ray.models import weights
from ddm_ray.models.flops import num_parameters
from ddm_ray.placement import TrainPlacement
from ddm_ray.run.graph import Artifact
from ddm_ray.run.run import Run
from ddm_ray.spelling import one_line
from ddm_ray.store.refusals import refusal
from ddm_ray.store.retries import LONG_RETRIES, RetryPolicy
from ddm_ray.train.attempt import TrainAttempt, out_of_memory
from ddm_ray.train.batches import RankBatches
from ddm_ray.train.compiling import keep_code, try_code
from ddm_ray.train.consensus import Flags, StepResults
from ddm_ray.train.engine import Engine, own_device
from ddm_ray.train.estimate import bytes_a_parameter
from ddm_ray.train.hardware import ranks_here
from ddm_ray.train.heldout import HeldoutLoss, Schedule
from ddm_ray.train.job import TrainJob, train_job
from ddm_ray.train.meter import Meter
from ddm_ray.train.publish import Milestones
from ddm_ray.train.saving import SaveClock, TrainProgress
from ddm_ray.train.teachers import Teachers, first_model, load_teachers, offloaded_teachers
from ddm_ray.train.watchdog import Watchdog

COMMIT_SECONDS = 20.0
"""Time for which a newer attempt that has dropped this one's last state is waited for to commit the job."""


def train(
    run_url: str,
    artifact: Artifact,
    placement: TrainPlacement,
    notice: Callable[[], bool] = lambda: False,
    launch: Launch | None = None,
    retry_policy: RetryPolicy = LONG_RETRIES,
) -> None:
    """Train `artifact` to its last step and commit it. Every rank of the torch.distributed world calls this.

    Goes on from the newest sound state of any earlier attempt. `notice` says whether this rank is to leave: all then
    save a state and raise Preempted. The attempt's claim names the `launch` that it belongs to, if any. Storage that is
    away is waited for with `retry_policy`.

    Raises Stopped, once a state is saved, where storage has a request to stop; Superseded once a newer attempt has
    taken this one's place, and saves nothing then; TrainingError for a
    gradient that isn't finite, OutOfMemory for a micro-batch that memory is too small for, CorruptArtifact or
    MissingArtifact for its rows, DriftError for a job begun under another configuration, StorageError for storage that
    stays away.
    """
    run = Run.open(run_url, retry_policy)
    if run.finished(artifact):
        return
    job = train_job(run, artifact)
    keep_code(placement.cache)
    with (
        TrainAttempt(run, job, placement, launch) as attempt,
        Loader(run, job.shards, job.train.seed, job.batch, placement.rows_gib, placement.cache, ranks_here()) as loader,
    ):
        torch.set_num_threads(attempt.threads)
        _train(run, job, loader, attempt, placement, notice)


def _train(
    run: Run,
    job: TrainJob,
    loader: Loader,
    attempt: TrainAttempt,
    placement: TrainPlacement,
    notice: Callable[[], bool],
) -> None:
    def make() -> Engine:
        with _roomy(job, placement):
            return Engine(job.build(filled=False), job.train, placement)

    def begin() -> Engine:
        with _roomy(job, placement):
            return Engine(first_model(run, job), job.train, placement)

    with (
        _teacher(run, job, loader, placement) as teacher,
        Watchdog(placement.hang_seconds, attempt.stuck) as watchdog,
        ExitStack() as stack,
    ):
        texts = StoredTexts.of(run, job.shards[0], own_device())
        where = dist.get_rank(), dist.get_world_size()
        batches = stack.enter_context(closing(RankBatches(job, loader, *where, attempt.micro_batch, teacher, texts)))
        engine, before = attempt.resume(make, begin)
        saver, owed = attempt.saver, False
        milestones = Milestones(run, attempt.storage, job, attempt.identity, engine, placement.keep_milestones)
        heldout, unmeasured = HeldoutLoss.of(run, job, placement, attempt.micro_batch, texts)
        measured = Schedule.of(job, placement)  # also where this attempt can't measure: what others did is kept
        meter = Meter(job, before, engine.device, dist.get_world_size(), measured)
        meter.unmeasured = unmeasured
        clock = SaveClock(placement.minutes_between_states, time.monotonic(), placement.checkpoint_steps is None)
        results = StepResults()
        if engine.compiled_unasked and before.step < job.train.steps:
            attempt.phase("compiling")  # it beats meanwhile
            with watchdog.step(), attempt.catch_oom():
                meter.uncompiled = try_code(engine, job, batches, before.step)
            watchdog.forget()
        for step in range(before.step, job.train.steps):
            done = step + 1
            if job.masking(step) != job.masking(step - 1):
                watchdog.forget()  # how long steps take, and what is compiled for them
                attempt.phase("compiling", meter.tell())
            with watchdog.step(), attempt.catch_oom():
                loss = engine.accumulate(job.objective, batches.at(step, engine.device))
                norm = engine.step(job.learning_rate(step))
                due = clock.due(time.monotonic())
                leaving = notice() or attempt.stopped
                hopeless = saver.hopeless
                flags = Flags(leaving, saver.writing, saver.busy, saver.refused, hopeless, attempt.overtaken, due)
                known, any_rank = results.exchange(step, loss, norm, flags)
                milestone = _due(done, placement.milestone_steps)
                owed = owed or any_rank.due or _due(done, placement.checkpoint_steps)
                saves = done < job.train.steps and (milestone or (owed and not any_rank.saving))
                measures = heldout is not None and heldout.schedule.due(done)
                if saves or measures or any_rank.leaving or done == job.train.steps:
                    known += results.rest()
            if any_rank.overtaken:
                attempt.give_way(done)  # before a state is committed that nobody goes on from
            if not any_rank.saving:
                clock.written(time.monotonic())
            saver.go_on(any_rank.writing, any_rank.refused)
            if any_rank.hopeless:
                attempt.end_unsaved(done)
            if wrong := next((result for result in known if not result.finite), None):
                raise TrainingError(
                    f"loss {wrong.loss} with gradient norm {wrong.norm} at step {wrong.step}; begin a run with a lower"
                    " learning_rate"
                )
            # Not `any`, which would leave the others uncounted.
            if max([meter.step(result.loss, result.norm) for result in known], default=False) or attempt.untold:
                attempt.tell(meter.tell())
            if heldout is not None and measures:  # who leaves, too: else the curve lacks it
                attempt.phase("measuring", meter.tell())
                with watchdog.measurement(heldout.steps), attempt.catch_oom("measuring the held-out loss, "):
                    meter.heldout(heldout.schedule.draws, heldout.measure(engine))
                attempt.tell(meter.tell())
            if any_rank.leaving:
                saver.save_now(engine, meter.trained())
                attempt.leave(done)
            if saves:
                then = partial(milestones.publish, done) if milestone else None
                if any_rank.saving:
                    attempt.phase("saving", meter.tell())  # it beats while the state before this one is written
                with attempt.catch_oom():
                    saver.save(engine, meter.trained(), then)
                clock.saved(time.monotonic())
                owed = False
        attempt.phase("publishing", meter.tell())
        last = meter.trained()
        saver.save_now(engine, last)
    if dist.get_rank() == 0:
        _finish(run, job, attempt, milestones, last, unmeasured)
    dist.barrier()


def _finish(
    run: Run, job: TrainJob, attempt: TrainAttempt, milestones: Milestones, last: TrainProgress, unmeasured: str
) -> None:
    """Publish the last state and commit the job, unless another attempt has."""
    try:
        milestones.wait()
        manifest = milestones.publish(last.step)
        milestones.wait()
    except (CorruptArtifact, OSError) as error:
        if _finished_by_newer(run, attempt):
            print(f"{job.artifact}: another attempt has finished it", file=sys.stderr)
            return
        # Damaged since, dropped by a newer attempt, or no space: another try goes on from what is sound.
        raise StorageError(f"the last state can't be published: {refusal(error)}") from None
    # Nobody waits for what comes after the commit.
    attempt.tidy()
    milestones.commit(manifest, last, unmeasured)


def _finished_by_newer(run: Run, attempt: TrainAttempt) -> bool:
    """True once a newer attempt has committed the job, which drops the states that it has overtaken just before."""
    store, artifact = run.store, attempt.job.artifact
    until = time.monotonic() + COMMIT_SECONDS
    while not run.finished(artifact):
        if max(claimed(store, artifact), default=0) <= attempt.storage.number or time.monotonic() > until:
            return False
        time.sleep(0.5)
    return True


@contextmanager
def _roomy(job: TrainJob, placement: TrainPlacement) -> Iterator[None]:
    """Turn running out of memory into a ConfigError, which passes: an attempt before this one may still hold some.

    It is one at once where a GPU's whole memory is less than the state takes.
    """
    device = own_device()
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        require_room(job, placement, dist.get_world_size(), memory)
    try:
        yield
    except Exception as error:
        if not out_of_memory(error):
            raise
        full = ConfigError(
            f"{job.artifact}: a worker's memory is too small for its weights and optimizer, by ZeRO stage"
            f" {placement.zero_stage} on {placement.workers.max} ({one_line(error, 200)}); give it more workers, or a"
            " higher zero_stage"
        )
        full.passes = True
        raise full from None


def require_room(job: TrainJob, placement: TrainPlacement, workers: int, memory: int) -> None:
    """Raise ConfigError for a state whose part in one of so many workers is more than a GPU's memory, in bytes.

    It passes where as many as the placement asks for would hold it: more of them may come.
    """
    parameters = num_parameters(weights.build(job.spec, "meta"))

    def part(workers: int) -> float:
        each = bytes_a_parameter(job.train.precision, workers, use_gpu=True)[placement.zero_stage]
        return (each or 0) * parameters

    if part(workers) > memory:
        full = ConfigError(
            f"{job.artifact}: a worker's GPU has {memory / 1e9:.1f} GB, weights and optimizer take"
            f" {part(workers) / 1e9:.1f} GB of each of {workers}, by ZeRO stage {placement.zero_stage}",
            "give it more workers, a higher zero_stage, or a larger GPU in the islands' file",
        )
        full.passes = part(placement.workers.max) <= memory
        raise full


@contextmanager
def _teacher(run: Run, job: TrainJob, loader: Loader, placement: TrainPlacement) -> Iterator[Teachers | None]:
    """The teacher of a student; None for other jobs."""
    if job.artifact.kind != "student":
        yield None
    elif placement.teachers is None:
        yield load_teachers(run, loader.null_text, own_device())
    else:
        with offloaded_teachers(run, loader.null_text, own_device(), placement.teachers, placement.cache) as offloaded:
            yield offloaded


def _due(done: int, every: int | None) -> bool:
    return every is not None and done % every == 0
