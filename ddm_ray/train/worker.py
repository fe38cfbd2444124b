"""THE training loop: every rank of every job runs `train`, with or without Ray around it."""

import sys
from collections.abc import Callable
from contextlib import ExitStack, closing

import torch
import torch.distributed as dist
from torch import nn

from ddm_ray.data.loading.loader import Loader
from ddm_ray.data.text_encoding import StoredTexts
from ddm_ray.errors import CorruptArtifact, StorageError
from ddm_ray.jobs.launches import Launch
from ddm_ray.placement import TrainPlacement
from ddm_ray.run.graph import Artifact
from ddm_ray.run.run import Run
from ddm_ray.store.refusals import may_pass, refusal
from ddm_ray.store.retries import LONG_RETRIES, RetryPolicy
from ddm_ray.train.batches import RankBatches
from ddm_ray.train.compiling import keep_code, try_code
from ddm_ray.train.deepspeed_setup import load_deepspeed
from ddm_ray.train.engine import Engine, own_device
from ddm_ray.train.failures import blame_micro_batch, blame_state
from ddm_ray.train.heldout import HeldoutLoss, Measurer, Schedule
from ddm_ray.train.job import train_job
from ddm_ray.train.membership import Membership
from ddm_ray.train.meter import Meter
from ddm_ray.train.pictures import Painter, Pictures
from ddm_ray.train.publish import Milestones
from ddm_ray.train.ranks import ranks_on_this_machine
from ddm_ray.train.reporter import Reporter
from ddm_ray.train.resume import resume_training
from ddm_ray.train.saver import Saver
from ddm_ray.train.state import TrainProgress
from ddm_ray.train.state_writer import StateWriter
from ddm_ray.train.step_sync import StepSync
from ddm_ray.train.teachers import first_model, model_for_state, teachers_of
from ddm_ray.train.watchdog import Watchdog


def train(
    run_url: str,
    artifact: Artifact,
    placement: TrainPlacement,
    notice: Callable[[], bool] = lambda: False,
    launch: Launch | None = None,
    retry_policy: RetryPolicy = LONG_RETRIES,
) -> None:
    """Train `artifact` to its last step and commit it. Every rank of the torch.distributed world calls this.

    Goes on from the newest sound state of any earlier attempt. `notice` says whether this rank has to leave: all ranks
    then save a state and raise Preempted. The attempt's claim names the `launch` that it belongs to, if any. Storage
    that is away is tried again with `retry_policy`.

    Raises Stopped, once a state is saved, if storage has a request to stop; Superseded once a newer attempt has taken
    this one's place (Overtaken if that one has ended), and saves nothing then; TrainingError for a gradient that isn't
    finite, OutOfMemory for a micro-batch that memory is too small for, CorruptArtifact or MissingArtifact for its rows,
    DriftError for a job that began with another configuration, StorageError for storage that stays away.
    """
    run = Run.open(run_url, retry_policy)
    if run.finished(artifact):
        return
    load_deepspeed()
    job = train_job(run, artifact)
    keep_code(placement.cache)
    membership = Membership(run, job, placement, launch, notice)
    writer = StateWriter(membership.attempt, membership.identity, placement.keep_states, membership.prompt_attempt)
    reports = membership.prompt_attempt if dist.get_rank() == 0 else None
    how = {"zero_stage": placement.zero_stage, "steps": job.train.steps}
    reporter = Reporter(reports, membership.facts() | how, writer)
    rows = (run, job.shards, job.train.seed, job.batch, placement.rows_gib, placement.cache, ranks_on_this_machine())
    # They end from right to left: a failure is noted before the writer waits, and the heartbeat ends last.
    with reporter, writer, membership, Loader(*rows) as loader:
        torch.set_num_threads(membership.threads)
        _train(placement, loader, membership, writer, reporter)


def _train(
    placement: TrainPlacement, loader: Loader, membership: Membership, writer: StateWriter, reporter: Reporter
) -> None:
    run, job, micro_batch = membership.run, membership.job, membership.micro_batch
    rank, world = dist.get_rank(), dist.get_world_size()
    texts = StoredTexts.of(run, job.shards[0], own_device())
    with (
        teachers_of(run, job, loader.null_text, own_device(), placement) as teachers,
        closing(RankBatches(job, loader, rank, world, micro_batch, teachers, texts)) as batches,
        Watchdog(placement.hang_seconds, membership.note_hang) as watchdog,
        ExitStack() as stack,
    ):
        engine, resumed = _engine_of(membership, placement)
        painter = Painter(membership, engine.device)
        milestones = Milestones(membership, engine, painter, placement.keep_milestones)
        pictures = stack.enter_context(closing(Pictures(membership, engine, painter, placement.pictures, resumed.step)))
        heldout, unmeasured = HeldoutLoss.of(run, job, placement, micro_batch, texts)
        # The schedule also if this attempt can't measure: it says which earlier measurements are kept.
        reporter.begin(Meter(job, resumed, engine.device, world, Schedule.of(job, placement), unmeasured))
        measurer = Measurer(heldout, engine, reporter, watchdog)
        saver = Saver(job.train.steps, placement, engine, writer, milestones, pictures, reporter)
        # In this order: a superseded attempt commits no state, and a loss that isn't finite ends before it is saved.
        policies = (membership, writer, reporter, measurer, saver)
        sync, first, last = StepSync(), resumed.step, job.train.steps
        with blame_micro_batch(micro_batch):
            if engine.compiled_unasked and first < last:
                reporter.say("compiling")
                with watchdog.step():
                    reporter.meter.uncompiled = try_code(engine, job, batches, first)
                watchdog.forget()
            for step in range(first, last):
                done = step + 1
                if job.masking(step) != job.masking(step - 1):  # more tokens from here on: another duration, other code
                    watchdog.forget()
                    reporter.say("compiling")
                with watchdog.step():
                    loss = engine.accumulate(job.objective, batches.at(step, engine.device))
                    norm = engine.step(job.learning_rate(step))
                    agreed = sync.exchange(step, loss, norm, membership.flags() | saver.flags())
                    if saver.acts_after(done, agreed) or measurer.acts_after(done):
                        agreed = sync.finish(agreed)  # on a GPU the result of this very step isn't known yet
                for policy in policies:
                    policy.after(done, agreed)
                if agreed.any_rank.leaving:
                    membership.leave(done)
        reporter.say("publishing")
        final = saver.save_now()
    if rank == 0:
        _publish(membership, writer, reporter, milestones, final)
    dist.barrier()


def _engine_of(membership: Membership, placement: TrainPlacement) -> tuple[Engine, TrainProgress]:
    """The engine of a job, with its newest state or with the weights that it begins with, and its progress."""
    run, job = membership.run, membership.job

    def make(model: Callable[[], nn.Module]) -> Engine:
        with blame_state(job.artifact, placement):
            return Engine(model(), job.train, placement)

    return resume_training(
        membership, lambda: make(lambda: model_for_state(run, job)), lambda: make(lambda: first_model(run, job))
    )


def _publish(
    membership: Membership, writer: StateWriter, reporter: Reporter, milestones: Milestones, final: TrainProgress
) -> None:
    """Publish the last state and commit the job, unless another attempt has."""
    try:
        manifest = milestones.publish(final.step)
    except (CorruptArtifact, OSError) as error:
        if membership.finished_by_newer():
            print(f"{membership.job.artifact}: another attempt has finished it", file=sys.stderr)
            return
        # Damaged since, dropped by a newer attempt, or no space: the next try goes on from a sound state.
        passes = isinstance(error, CorruptArtifact) or may_pass(error)
        raise StorageError(f"the last state can't be published: {refusal(error)}", passes=passes) from None
    # Before the commit, since observers don't read a job any more once it is committed.
    writer.drop_all_but(1)
    reporter.end_curves()
    milestones.commit(manifest, final, reporter.meter.unmeasured)
