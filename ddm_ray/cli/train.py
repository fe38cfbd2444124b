"""The verb that trains one network of a run, or all networks that a mixture needs."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import click

from ddm_ray.cli.command import (
    ADDRESS,
    INDEX,
    ISLAND,
    ISLANDS,
    MODELS,
    RUN,
    OneOf,
    main,
    say,
    say_derived,
    trained,
    with_extras,
)
from ddm_ray.cli.devices import GPU, placed, require_gpu, tell_of_workers
from ddm_ray.cli.fixes import by, next_of, phrase
from ddm_ray.cli.leaving import require_no_other, require_no_other_here, saving_first
from ddm_ray.errors import ConfigError, DDMError
from ddm_ray.run.graph import Artifact, wanted_of
from ddm_ray.spelling import some

ALL = "all"


@main.command()
@RUN
@click.argument("model", type=OneOf([*MODELS, ALL]))
@INDEX
@with_extras("all: train")
@GPU
@ISLANDS
@ISLAND
@ADDRESS
@click.option("--take-over", is_flag=True, help="If other commands train it now, let them save their states and end.")
def train(
    run_url: str,
    model: str,
    index: int | None,
    extras: list[str],
    gpu: bool | None,
    islands: str | None,
    island: str | None,
    address: str | None,
    take_over: bool,
) -> None:
    """Train one model of RUN, or `all` experts and the router.

    The models are `expert INDEX`, the `router`, the `monolith` with which the mixture is compared, and the `student`,
    one ordinary network that learns what the finished experts predict. `all` trains as many models at once as CPUs (or
    GPUs) and memory allow; the others wait. It includes monolith and student only with --monolith and --student.
    Finished models are skipped. If one fails, the others go on.

    As training goes on, pictures of what the models sample appear below RUN, at 1/64 of the steps at the earliest. They
    take 1 % of the time at most. The command and `ddm status` say where the newest lies.

    An expert needs only run.json and its own shard. You may kill this command at any moment; the same command continues
    from the last saved states. After SIGTERM it saves states first. While another command trains a model, it doesn't
    begin: --take-over lets that one save its state and end.

    Exit code 0: all is finished. 75: the same command may work later, because storage or Ray is away, workers were lost
    too often in a row, another command trains it, or after SIGTERM. 130: Ctrl-C. 1: something must be mended first, or
    another launch has taken over.

    \b
      ddm train runs/digits all --monolith
      ddm train runs/digits expert 0
      ddm train runs/digits router
      ddm train runs/digits student
      ddm train s3://bucket/run7 expert 3 --islands islands.yaml --island room-2
    """
    from ddm_ray.placement import load_island
    from ddm_ray.run.run import Run

    run = Run.open(run_url)
    if model == ALL and index is not None:
        raise ConfigError("train all: takes no INDEX")
    if extras and model != ALL:
        raise ConfigError(f"--{extras[0]} is for all: train {model} trains that alone; leave it out")
    site = load_island(islands, island)
    site = site.model_copy(update={"train": placed(site.train, gpu)})
    if model == ALL:
        _train_all(run_url, run, wanted_of(run.config, extras), site, address, bool(gpu), take_over)
        return
    artifact = trained("train", model, index, run.config.partition.clusters)
    _train_one(run, artifact, site, address, bool(gpu), take_over)
    if not islands and (following := next_of(run, run_url)):
        say(f"next: {following}")


def _train_one(run: Any, artifact: Artifact, site: Any, address: str | None, asked: bool, take_over: bool) -> None:
    """Train one artifact, unless it is finished, with a live view, and print the result."""
    from ddm_ray.jobs.launches import Launch, noted
    from ddm_ray.jobs.status import require_sound
    from ddm_ray.jobs.stops import StopRequests
    from ddm_ray.submitted import submitted_job
    from ddm_ray.watch.live_view import LiveView

    require_sound(run, [artifact])
    if not run.finished(artifact):
        StopRequests(run.store, artifact, None).require_none()
        # What is refused here isn't a launch that failed.
        for input_artifact in run.inputs(artifact):
            run.require(input_artifact)
        require_no_other(run, [artifact], take_over)
        with LiveView(run.url, [artifact], phrase=by("this command")) as view:
            view.show(artifact, 0.0, "starting")
            # Noted first, so that other machines see why a launch ended here.
            with noted(run.store, Launch(artifact, island=site.name, job=submitted_job() or "")) as launch:
                _train(run, [artifact], site, address, view.jobs, _starting(view), asked, launch)
            view.stage(artifact, 1.0)
    _tell(run, [artifact], accepting=True)
    say_derived(run)


def _starting(view: Any, run: Any = None) -> Callable[[Artifact], None]:
    """A function that says in a live view that an artifact's worker starts.

    `run`: it raises InTraining if another command has begun to train it while it was queued here.
    """

    def starting(artifact: Artifact) -> None:
        if run is not None:
            require_no_other_here(run, artifact)
        view.show(artifact, 0.0, "starting a training worker")

    return starting


def _tell(run: Any, artifacts: list[Artifact], before: str = "", accepting: bool = False) -> None:
    """Print how each of these trainings has ended, and where pictures of what the models sample lie.

    `accepting`: also the command that accepts each one, if a person has to do that.
    """
    from ddm_ray.jobs.describe import describe
    from ddm_ray.jobs.job_files import list_jobs
    from ddm_ray.jobs.status import status

    files = list_jobs(run.store, artifacts)
    statuses = [status(run, artifact, files[artifact]) for artifact in artifacts]
    for each in statuses:
        shown = each if accepting else replace(each, unaccepted=False)
        say(f"{each.artifact}: {before}{describe(shown, phrase)}")
    if pictures := [f"{each.run}/{each.artifact}/{each.picture[1]}" for each in statuses if each.picture]:
        say(f"pictures of what they sample: {some(pictures, 1)}" if pictures[1:] else f"its samples: {pictures[0]}")


def _train_all(
    run_url: str,
    run: Any,
    artifacts: tuple[Artifact, ...],
    site: Any,
    address: str | None,
    asked: bool,
    take_over: bool,
) -> None:
    """Train the unfinished ones of these artifacts, and print the result of each, and one next command."""
    from ddm_ray.jobs.status import require_sound

    require_sound(run, artifacts)
    left = [artifact for artifact in artifacts if not run.finished(artifact)]
    _tell(run, [artifact for artifact in artifacts if artifact not in left], "finished already, ")
    _require_some(run, left)
    if left:
        require_no_other(run, left, take_over)
        _train_several(run, left, artifacts, site, address, asked)
    if following := next_of(run, run_url):
        say(f"next: {following}")


def _train_several(
    run: Any, left: list[Artifact], artifacts: tuple[Artifact, ...], site: Any, address: str | None, asked: bool
) -> None:
    """Train the artifacts that are `left` of all, with one live view, and print the results in the order of all."""
    from ddm_ray.watch.live_view import LiveView

    left = most_work_first(run, left)
    rows: list[str] = [each for each in artifacts if each in left]
    with each_failure_named(), LiveView(run.url, rows, phrase=by("this command")) as view:
        _train(run, left, site, address, view.jobs, _starting(view, run), asked)
        for artifact in left:
            view.stage(artifact, 1.0)
    _tell(run, [artifact for artifact in artifacts if artifact in left])


def most_work_first(run: Any, artifacts: list[Artifact]) -> list[Artifact]:
    """The artifacts in the order in which they train: the longest isn't left for the end, when it would run alone.

    A student has to wait for others, whatever its place.
    """
    from ddm_ray.islands.run_view import work_of

    try:
        work = {artifact: work_of(run)(artifact) for artifact in artifacts}
    except DDMError:  # the training job reports it
        return artifacts
    return sorted(artifacts, key=work.__getitem__, reverse=True)


@contextmanager
def each_failure_named() -> Iterator[None]:
    """Print a line for each training job that failed, before the error with their number."""
    try:
        yield
    except DDMError as error:
        for artifact, each in getattr(error, "errors", {}).items():
            say(f"{artifact}: {each.text(phrase).removeprefix(f'{artifact}: ')}", err=True)
        raise


def _require_some(run: Any, artifacts: list[Artifact]) -> None:
    """Raise what the first artifact lacks, if each artifact lacks an input that isn't among the others."""
    lacks: list[DDMError] = []
    for artifact in artifacts:
        try:
            for needed in run.inputs(artifact):
                if needed not in artifacts:
                    run.require(needed)
            return
        except DDMError as error:
            lacks.append(error)
    if lacks:
        raise lacks[0]


def _train(
    run: Any,
    artifacts: list[Artifact],
    site: Any,
    address: str | None,
    watch: Callable[[list[Any]], None],
    starting: Callable[[Artifact], None],
    gpu: bool,
    launch: Any = None,
) -> None:
    """Train artifacts on the Ray of the island or address. `gpu`: --gpu was given. `launch`: noted already."""
    from ddm_ray.cores import usable_cores
    from ddm_ray.ray_session import cluster_total, keep_logs, ray_session
    from ddm_ray.train.ray.driver import start_fork_server
    from ddm_ray.train.ray.train_all import train_all

    start_fork_server()  # while Ray starts
    ray_address, token_file = site.ray(address)
    if gpu:
        require_gpu(ray_address)
    if not (site.name or ray_address or os.environ.get("RAY_ADDRESS")):  # no file and no cluster sets the CPUs
        site = site.model_copy(update={"train": sharing_idle_cores(site.train, len(artifacts))})
    asked = min(usable_cores(), len(artifacts) * site.train.workers.min * site.train.asked.get("CPU", 0.0))
    with (
        ray_session(ray_address, token_file, asked) as private,
        saving_first(run, artifacts, watch) as (watch_and_leave, leaving),
    ):
        tell_of_workers("train", site.train.use_gpu, cluster_total("GPU"))
        placements = dict.fromkeys(artifacts, site.train)
        if private and len(artifacts) > 1 and not site.train.use_gpu:
            placements = _with_memory(run, artifacts, site.train)
        train_all(
            run, artifacts, placements, watch_and_leave, not private, launch, site.name, starting, keep_logs, leaving
        )


def sharing_idle_cores(placement: Any, jobs: int) -> Any:
    """`sharing` with the cores of this machine that no other command keeps busy."""
    from ddm_ray.cores import usable_cores
    from ddm_ray.private_folder import busy_cores

    return sharing(placement, jobs, int(usable_cores() - busy_cores()))


def sharing(placement: Any, jobs: int, cores: int) -> Any:
    """The placement for so many jobs, in which each worker requests its whole share of the cores.

    As many jobs run at once as there are cores for. A placement on GPUs isn't changed.
    """
    if placement.use_gpu:
        return placement
    workers = placement.workers.max
    at_once = min(jobs, max(1, cores // workers))
    each = float(max(1, cores // (at_once * workers)))
    return placement.model_copy(update={"resources_per_worker": {**placement.resources_per_worker, "CPU": each}})


def _with_memory(run: Any, artifacts: list[Artifact], placement: Any) -> dict[Artifact, Any]:
    """The placement by artifact. Each requests the memory of a worker from this machine's Ray."""
    from ddm_ray.islands.needs import needs_of
    from ddm_ray.ray_session import cluster_total

    placements: dict[Artifact, Any] = {}
    with suppress(DDMError):  # the training job reports it
        for need in needs_of(run, artifacts):
            # Jobs that don't fit are trained one at a time, and may find room after all.
            memory = min(need.memory_on_cpu(placement), cluster_total("memory") / placement.workers.min)
            resources = placement.resources_per_worker
            resources = resources | {"memory": resources.get("memory", float(int(memory)))}
            placements |= dict.fromkeys(need.left, placement.model_copy(update={"resources_per_worker": resources}))
    return dict.fromkeys(artifacts, placement) | placements
