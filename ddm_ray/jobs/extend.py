"""Extending a run: what is looked at before more steps are promised, and the run that they are trained in."""

from dataclasses import dataclass

from ddm_ray.config.longer import OTHERWISE, Part, lengthened, train_of
from ddm_ray.errors import ConfigError, MissingArtifact, StorageError
from ddm_ray.jobs.attempts import SavedState, saved_states
from ddm_ray.jobs.job_files import list_jobs
from ddm_ray.remedies import Begin
from ddm_ray.run import graph
from ddm_ray.run.extension import EXTENDED, FILE, MAX_EXTENSIONS, SHARED, Extension, folder_of, untouched
from ddm_ray.run.graph import EXTRAS, Artifact, part_of
from ddm_ray.run.run import RUN_FILE, Run
from ddm_ray.store.store import Store


@dataclass(frozen=True)
class Extended:
    """An extension, and of each job that goes on in it the step from which; `anew`: finished ones that begin again."""

    run: Run
    goes_on: dict[Artifact, int]
    anew: tuple[Artifact, ...]


def extend(run: Run, steps: dict[Part, int]) -> Extended:
    """The extension of a run that trains for so many steps: a new one, or the one that there is already.

    Raises ConfigError where more steps aren't the same training, or nothing has been trained; MissingArtifact where a
    job has finished whose state is gone, or hasn't finished and isn't extended; StorageError.
    """
    config = lengthened(run.config, steps)
    jobs = graph.trained_of(config)
    longer = [artifact for artifact in jobs if part_of(artifact) in steps]
    goes_on, anew = _reached(run, longer)
    if not goes_on:
        part = next(iter(steps))
        begin = Begin(run.url, f"{part}.train.steps", str(steps[part]))
        raise ConfigError(f"{run.url}: nothing of that has been trained yet", begin)
    inherited = {folder for folder in untouched(run.config, config) if folder in SHARED or _is_finished(run, folder)}
    url = place_of(run, Extension(steps=steps, inherits=tuple(sorted(inherited))))
    Run.create(url, config)
    return Extended(Run.open(url), goes_on, anew)


def extensions(run: Run) -> list[str]:
    """URLs of the extensions of a run; of one that a kill left without its run.json there is none yet."""
    names = run.store.folders(EXTENDED)
    return [f"{run.url}/{EXTENDED}/{name}" for name in names if run.store.exists(f"{EXTENDED}/{name}/{RUN_FILE}")]


def _reached(run: Run, artifacts: list[Artifact]) -> tuple[dict[Artifact, int], tuple[Artifact, ...]]:
    """Steps of the newest states of jobs, and the jobs that have finished and have none, where a mixture can lack them.

    What hasn't begun is neither.
    """
    reached: dict[Artifact, int] = {}
    anew: list[Artifact] = []
    for artifact in artifacts:
        state = next((each for each in saved_states(run.store, artifact) if isinstance(each, SavedState)), None)
        if state:
            reached[artifact] = state.step
        elif not run.finished(artifact):
            continue
        elif artifact.kind in EXTRAS:
            anew.append(artifact)
        else:
            raise MissingArtifact(
                f"{run.url}/{artifact} has finished, and the state that it ended with is gone, as after tidying: its"
                f" weights alone don't go on to the bit. Bring it back, {OTHERWISE}"
            )
    return reached, tuple(anew)


def _is_finished(run: Run, folder: str) -> bool:
    """True if all artifacts in a folder that isn't extended are finished; else they are made in the extension.

    Raises MissingArtifact for a training that has begun, which nobody would go on with.
    """
    names = run.store.folders(graph.REFERENCES) if folder == graph.REFERENCES else []
    every = (*graph.artifacts(run.config), *(graph.reference(name) for name in names))
    members = [artifact for artifact in every if folder_of(artifact) == folder]
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


def place_of(run: Run, extension: Extension) -> str:
    """The URL of an extension, whose record is left in the first place that is free or has one like it."""
    data = extension.to_json()
    for number in range(1, MAX_EXTENSIONS + 1):
        url = f"{run.url}/{EXTENDED}/{number:04d}"
        store = Store(url)
        # Before run.json, without which it is no run: a killed command leaves none that looks like one of its own.
        if not store.create(FILE, data):
            other = Extension.read(store)
            # What was finished then is its own affair.
            if other is None or (other.steps, other.appends) != (extension.steps, extension.appends):
                continue
        return url
    raise StorageError(f"{run.url}/{EXTENDED}: has {MAX_EXTENSIONS} extensions, and no number is left", passes=False)
