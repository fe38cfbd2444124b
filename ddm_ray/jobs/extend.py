"""Extending a run: the checks before more steps are trained, and the run in which they are trained."""

from dataclasses import dataclass

from ddm_ray.config.longer import OTHERWISE, Part, lengthened, train_of
from ddm_ray.errors import ConfigError, MissingArtifact, StorageError
from ddm_ray.jobs.attempts import SavedState, saved_states
from ddm_ray.jobs.job_files import list_jobs
from ddm_ray.remedies import Begin
from ddm_ray.run import graph
from ddm_ray.run.extension import EXTENDED, FILE, MAX_EXTENSIONS, SHARED, Extension, folder_of, untouched
from ddm_ray.run.graph import EXTRAS, Artifact, part_of
from ddm_ray.run.inventory import inventory
from ddm_ray.run.run import RUN_FILE, Run
from ddm_ray.store.store import Store


@dataclass(frozen=True)
class Extended:
    """An extension. `goes_on`: step from which each job continues. `begins_again`: finished jobs without a state."""

    run: Run
    goes_on: dict[Artifact, int]
    begins_again: tuple[Artifact, ...]


def extend(run: Run, steps: dict[Part, int]) -> Extended:
    """Create the extension of a run that trains for so many steps, or return the existing one.

    Raises ConfigError if more steps change the training, or if nothing has been trained. Raises MissingArtifact if the
    state of a finished job is gone, or if an unfinished job isn't extended. Raises StorageError.
    """
    config = lengthened(run.config, steps)
    jobs = graph.trained_of(config)
    longer = [artifact for artifact in jobs if part_of(artifact) in steps]
    goes_on, begins_again = _reached(run, longer)
    if not goes_on:
        part = next(iter(steps))
        begin = Begin(run.url, f"{part}.train.steps", str(steps[part]))
        raise ConfigError(f"{run.url}: nothing of that has been trained yet", begin)
    inherited = {folder for folder in untouched(run.config, config) if folder in SHARED or _is_finished(run, folder)}
    url = reserve_extension(run, Extension(steps=steps, inherits=tuple(sorted(inherited))))
    Run.create(url, config)
    return Extended(Run.open(url), goes_on, begins_again)


def extensions(run: Run) -> list[str]:
    """URLs of the extensions of a run. Extensions that a kill left without a run.json don't count."""
    names = run.store.folders(EXTENDED)
    return [f"{run.url}/{EXTENDED}/{name}" for name in names if run.store.exists(f"{EXTENDED}/{name}/{RUN_FILE}")]


def _reached(run: Run, artifacts: list[Artifact]) -> tuple[dict[Artifact, int], tuple[Artifact, ...]]:
    """Steps of the newest states of jobs, and finished jobs without a state that a mixture doesn't need.

    Jobs that haven't begun are in neither. Raises MissingArtifact for a finished job without a state that it needs.
    """
    reached: dict[Artifact, int] = {}
    stateless: list[Artifact] = []
    for artifact in artifacts:
        state = next((each for each in saved_states(run.store, artifact) if isinstance(each, SavedState)), None)
        if state:
            reached[artifact] = state.step
        elif not run.finished(artifact):
            continue
        elif artifact.kind in EXTRAS:
            stateless.append(artifact)
        else:
            raise MissingArtifact(
                f"{run.url}/{artifact} has finished, and its last state is gone, as after garbage collection: weights"
                f" alone don't continue to the same bits. Bring it back, {OTHERWISE}"
            )
    return reached, tuple(stateless)


def _is_finished(run: Run, folder: str) -> bool:
    """True if all artifacts in a folder that isn't extended are finished. Otherwise the extension makes them.

    Raises MissingArtifact for an unfinished job that has begun, since no run would continue it.
    """
    members = [artifact for artifact in inventory(run) if folder_of(artifact) == folder]
    unfinished = [artifact for artifact in members if not run.finished(artifact)]
    files = list_jobs(run.store, [each for each in members if each.trains])
    if unfinished and any(job.attempts for job in files.values()):
        part = part_of(unfinished[0])
        assert part
        raise MissingArtifact(
            f"{run.url}/{unfinished[0]} isn't finished, and stays at {train_of(run.config, part).steps} steps: finish"
            f" it first, or raise {part}.train.steps, too",
            run.make(unfinished[0]),
        )
    return bool(members) and not unfinished


def reserve_extension(run: Run, extension: Extension) -> str:
    """Write an extension's record to the first number that is free or has an equal record, and return its URL."""
    data = extension.to_json()
    for number in range(1, MAX_EXTENSIONS + 1):
        url = f"{run.url}/{EXTENDED}/{number:04d}"
        store = Store(url)
        # The record comes before run.json: a killed command leaves no folder that looks like a run without a base.
        if not store.create(FILE, data):
            other = Extension.read(store)
            # Inherited folders may differ: they depend on what was finished at that time.
            if other is None or (other.steps, other.appends) != (extension.steps, extension.appends):
                continue
        return url
    raise StorageError(f"{run.url}/{EXTENDED}: has {MAX_EXTENSIONS} extensions, and no number is left", passes=False)
