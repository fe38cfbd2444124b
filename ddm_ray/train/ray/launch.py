"""Many training jobs at once, each with a Ray Train of its own, watched on storage."""

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import ray
from ray.exceptions import RayActorError

from ddm_ray.errors import DDMError, GaveUp, RayAway, RayError, Stopped, StorageError, Superseded
from ddm_ray.placement import PREDEFINED, TrainPlacement, submitted_job
from ddm_ray.ray_internals import HEAD_RESOURCE
from ddm_ray.storage.graph import Artifact
from ddm_ray.storage.job_files import JobFiles, list_jobs
from ddm_ray.storage.launches import FailureBudget, Launch, LaunchReader
from ddm_ray.storage.observer import LOOK_SECONDS, Observer
from ddm_ray.storage.run import Run
from ddm_ray.storage.status import Status, status
from ddm_ray.train.ray.recovery import environment, forget, innermost, reason, run_id, tend_cluster

AWAY_SECONDS = 10.0
# After how long a job that no worker has begun is said to wait for room; a start takes less.
ROOM_SECONDS = 45.0


def train_all(
    run: Run,
    artifacts: Sequence[Artifact],
    placement: TrainPlacement | Mapping[str, TrainPlacement],
    watch: Callable[[list[Status]], None] | None = None,
    may_grow: bool = False,
    launch: Launch | None = None,
) -> None:
    """Train several artifacts of a run side by side; returns when all are committed, which storage says.

    Each has a `placement` of its own where they are given by artifact. `watch` is called with the statuses of all
    artifacts, twice a second at first and each five seconds where nothing changes. `launch` is that of the only
    artifact, where one has begun. Raises DDMError as soon as one job has given up, and RayError if the Ray cluster
    hasn't what a placement asks for, unless it `may_grow`: then that is said, and waited for.
    """
    unfinished = [artifact for artifact in artifacts if not run.finished(artifact)]
    placements = [placement if isinstance(placement, TrainPlacement) else placement[each] for each in unfinished]
    for lack in dict.fromkeys(_lack(each, may_grow) for each in placements):
        if lack:
            text = f"warning: {lack}; waiting for nodes. If none will come: Ctrl-C, and change islands.yaml"
            print(text, file=sys.stderr)
    if (gpus := ray.cluster_resources().get("GPU")) and not any(each.use_gpu for each in placements):
        print(f"warning: Ray has {gpus:g} GPUs, of which this uses none; see use_gpu in islands.yaml", file=sys.stderr)
    files = list_jobs(run.store, artifacts)
    # The id that Ray's commands take; a private Ray's is of no use to anybody.
    cluster_job = submitted_job() or (ray.get_runtime_context().get_job_id() if may_grow else "")
    launches = [launch or Launch(each, after=max(files[each].attempts, default=0)) for each in unfinished]
    launches = [replace(each, job=each.job or cluster_job) for each in launches]
    jobs = [_Job(run, *each, files[each[0].artifact]) for each in zip(launches, placements, strict=True)]

    def listing(known: Sequence[Status]) -> list[Status]:
        nonlocal files
        files = list_jobs(run.store, artifacts)
        finished = {each.artifact: each for each in known if each.state == "finished"}
        return [finished.get(artifact) or status(run, artifact, files[artifact]) for artifact in artifacts]

    observer = Observer(run, listing, least=LOOK_SECONDS)
    supervisors: dict[str, Any] = {}
    away = False
    try:
        for job in jobs:
            job.start(supervisors, len(jobs))
        waiting = jobs
        while waiting:
            tasks = [job.task for job in waiting]
            # The cluster tells at once of a job that ends; storage is asked for all else.
            ray.wait(tasks, num_returns=1, timeout=observer.pause(time.monotonic()))
            ended, _ = ray.wait(tasks, num_returns=len(tasks), timeout=0)
            try:
                if ended:
                    observer.list_next()
                statuses = observer.look(time.monotonic())
                waiting = [job for job in waiting if not job.finished(files)]
                if watch:
                    watch(statuses)
                problems = [job.error(files) or (job.reason() if job.task in ended else None) for job in waiting]
                away = False
            except StorageError as error:
                # What is away from here may be there for those who train.
                if len(ended) == len(tasks):
                    raise
                if not away:
                    print(f"warning: {error}; trying again", file=sys.stderr)
                problems, away = [], True
                time.sleep(LOOK_SECONDS)
            for problem in filter(None, problems):
                raise problem
            for job in waiting:
                job.warn_if_it_waits(files)
    finally:
        # With them end their controllers and workers, which would go on trying.
        for supervisor in supervisors.values():
            ray.kill(supervisor)
        for job in jobs:
            forget(run_id(run, job.launch.artifact))


class Supervisor:
    """An actor whose threads wait for Ray Train and tend the cluster for it: nothing in it revives a controller."""

    def __init__(self) -> None:
        # Pandas and Ray Data, which the driver can do without. Before there are threads: their modules import each
        # other in circles, and of two threads that begin at different ends each would wait for the other.
        import_module("ddm_ray.train.ray.fit")
        threading.Thread(target=tend_cluster, daemon=True).start()

    def fit(self, run_url: str, launch: Launch, placement: TrainPlacement) -> None:
        """See `fit`; a controller that is killed or fails is replaced, while the launch's failure budget lasts.

        Raises StorageError that doesn't pass, or where storage can't be made to say that the launch has given up, and
        Superseded.
        """
        from ray.train import ControllerError

        from ddm_ray.train.ray.fit import fit

        budget, again = FailureBudget(run_url, launch, placement.max_failures), False
        while True:
            try:
                return fit(run_url, launch, placement)
            except (RayActorError, ControllerError) as error:
                again = True
                refusal = getattr(error, "controller_failure", None)
                if isinstance(refusal, StorageError | Superseded | Stopped):
                    raise refusal from None  # given up where storage doesn't say so, or left to others
                if budget.spend(reason(error)):
                    raise budget.refusal or error from None
            except StorageError as error:
                if not again or not error.passes:
                    raise
                time.sleep(AWAY_SECONDS)  # it was there, and will be


class _Job:
    """One artifact that is being trained."""

    def __init__(self, run: Run, launch: Launch, placement: TrainPlacement, files: JobFiles):
        self.run, self.launch, self.placement = run, launch, placement
        self.task: Any = None
        self._reader = LaunchReader(run.store, launch, files)
        self._began: float | None = time.monotonic()

    def start(self, supervisors: dict[str, Any], jobs: int) -> None:
        """Begin, under the supervisor of all jobs that are placed alike."""
        key = self.placement.model_dump_json()
        if key not in supervisors:
            actor: Any = ray.remote(Supervisor)
            # Without a CPU of its own, on the head where no training node takes it and its controllers along, and
            # started again and asked again if it dies. Its `fit` returns long after the commit; nobody waits for that.
            supervisors[key] = actor.options(
                num_cpus=0,
                resources={HEAD_RESOURCE.get(): 0.001},
                max_restarts=-1,
                max_task_retries=-1,
                max_concurrency=jobs,
                runtime_env={"env_vars": environment(self.placement)},
            ).remote()
        self.task = supervisors[key].fit.remote(self.run.url, self.launch, self.placement)

    def finished(self, files: Mapping[Artifact, JobFiles]) -> bool:
        """True if the artifact is committed. Raises DriftError if it is another run's."""
        artifact = self.launch.artifact
        return files[artifact].committed and self.run.finished(artifact) is not None

    def error(self, files: Mapping[Artifact, JobFiles]) -> DDMError | None:
        """Why the launch goes no further, as a worker or its controller noted on storage; None: it does."""
        return self._reader.error(files[self.launch.artifact])

    def warn_if_it_waits(self, files: Mapping[Artifact, JobFiles]) -> None:
        """Say once, after ROOM_SECONDS without a worker, what the job asks for and what is free."""
        if self._began is None or time.monotonic() - self._began < ROOM_SECONDS:
            return
        self._began = None
        artifact = self.launch.artifact
        if not self._reader.attempts(files[artifact]):
            print(f"warning: {artifact}: no worker has begun yet; {_room(self.placement)}", file=sys.stderr)

    def reason(self) -> DDMError | None:
        """Why it ended without having committed: the innermost error that a worker raised."""
        artifact = self.launch.artifact
        if self.run.finished(artifact):
            return None
        try:
            ray.get(self.task)
        except Exception as error:
            cause = innermost(error)
            if isinstance(cause, DDMError):
                return cause
            again = "the same command goes on from its last state"
            return GaveUp(f"{artifact} stopped: {reason(cause)}; {again}")
        return GaveUp(f"{artifact} ended uncommitted", self.run.make(artifact))


def _room(placement: TrainPlacement) -> str:
    """Text on the resources that are asked for, and those that are free now."""
    asked, free = placement.asked, ray.available_resources()
    each = " and ".join(f"{amount:g} {name}" for name, amount in asked.items())
    left = ", ".join(f"{free.get(name, 0):g} {name}" for name in asked)
    return f"it asks for {placement.workers.min} x ({each}), free are {left}"


def _lack(placement: TrainPlacement, may_grow: bool) -> str | None:
    """Text on what the Ray cluster lacks of the placement now; Ray itself would wait for ever, without a word.

    RayError if it isn't to be waited for; RayAway for a custom resource that no node has: its nodes are still to come
    back, or more likely its name is wrong.
    """
    least = placement.workers.min
    asked = placement.asked
    resources = ray.cluster_resources()
    for name in set(placement.slices) - resources.keys():
        others = sorted(other for other in resources if other not in PREDEFINED and ":" not in other)
        known = f"has {', '.join(others)}" if others else "has none"
        raise RayAway(
            f"placement asks for {name}, which no node of the Ray cluster has (it {known}); start nodes that"
            f" have it (Ray's resources '{{\"{name}\": 1}}'), or change resources_per_worker in islands.yaml"
        )
    lacking = [name for name, amount in asked.items() if resources.get(name, 0) < amount * least]
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    room = sum(int(min(node.get(name, 0) / amount for name, amount in asked.items()) + 1e-6) for node in nodes)
    if lacking:
        name = lacking[0]
        lack = f"placement asks for {least} x {asked[name]:g} {name}, Ray has {resources.get(name, 0):g}"
    elif room < least:
        each = " and ".join(f"{amount:g} {name}" for name, amount in asked.items())
        lack = f"placement asks for {least} workers of {each}, the nodes have room for {room}"
    else:
        return None
    if not may_grow:
        raise RayError(f"{lack}; change workers or resources_per_worker in islands.yaml")
    return lack
