"""All stages on one computer: prepare real images, train experts side by side, draw a picture and a table."""

import math
from collections.abc import Callable
from functools import partial

from ddm_ray.config import load_recipe
from ddm_ray.cores import usable_cores
from ddm_ray.jobs.job_files import list_jobs
from ddm_ray.jobs.status import status
from ddm_ray.placement import TrainPlacement
from ddm_ray.remedies import Fix
from ddm_ray.run.graph import MONOLITH, PARTITION, ROUTER, ROWS, Artifact, evaluation
from ddm_ray.run.run import Run
from ddm_ray.watch.live_view import LiveView

NAME = "demo"
CHECKPOINT_STEPS = 100


def demo(folder: str, recipe: str, settings: tuple[str, ...], phrase: Callable[[Fix], str] = str) -> Run:
    """Make every artifact that `folder` still lacks, and show a live view. Finished stages are skipped.

    `phrase` puts remedies into words. Raises DriftError if the folder holds a run of another configuration, and the
    errors of the stages.
    """
    from ddm_ray.sampling.initial_weights import create_run  # imports torch, which takes seconds

    run, _ = create_run(folder, load_recipe(recipe, settings))
    jobs = [MONOLITH, *run.experts, ROUTER]  # the longest first
    last = evaluation(NAME)
    with LiveView(f"{recipe} -> {run.url}", [ROWS, PARTITION, *jobs, last], phrase=phrase) as view:
        if not all(run.finished(artifact) for artifact in (ROWS, PARTITION, *jobs)):
            _make(run, jobs, view)
        for artifact in (ROWS, PARTITION):
            view.show(artifact, 1.0, "done")
        files = list_jobs(run.store, jobs)
        view.jobs([status(run, job, files[job]) for job in jobs])
        from ddm_ray.evaluate.run import evaluate

        evaluate(run, NAME, partial(view.stage, last))
        view.stage(last, 1.0)
    return run


def _make(run: Run, jobs: list[Artifact], view: LiveView) -> None:
    view.show(ROWS, 0.0, "starting a private Ray")
    from ddm_ray.data.partition.stage import partition
    from ddm_ray.data.prepare.stage import prepare
    from ddm_ray.ray_session import keep_logs, ray_session
    from ddm_ray.train.ray.driver import start_fork_server
    from ddm_ray.train.ray.train_all import train_all

    cores = usable_cores()
    # All jobs train at once and share the cores, however few there are, so that each shows progress from the start.
    placement = TrainPlacement(
        resources_per_worker={"CPU": min(1.0, max(0.01, math.floor(100 * cores / len(jobs)) / 100))},
        checkpoint_steps=CHECKPOINT_STEPS,
    )
    with ray_session("local", cores=cores):
        start_fork_server()  # it loads its libraries while Ray Data makes the rows
        prepare(run, partial(view.stage, ROWS))
        view.stage(ROWS, 1.0)
        partition(run, partial(view.stage, PARTITION))
        view.stage(PARTITION, 1.0)
        unfinished = [job for job in jobs if not run.finished(job)]
        for job in unfinished:
            view.show(job, 0.0, "starting a training worker")
        train_all(run, jobs, placement, view.jobs, lost=keep_logs)
