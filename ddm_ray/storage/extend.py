"""Extending a run: what is looked at before more steps are promised, and the run that they are trained in."""

from dataclasses import dataclass

from ddm_ray.config.longer import OTHERWISE, Part, lengthened, train_of
from ddm_ray.errors import Begin, ConfigError, MissingArtifact, StorageError
from ddm_ray.storage import graph
from ddm_ray.storage.attempts import SavedState, saved_states
from ddm_ray.storage.extension import EXTENDED, FILE, MOST, Extension, untouched
from ddm_ray.storage.graph import EXTRAS, Artifact, part_of
from ddm_ray.storage.job_files import list_jobs
from ddm_ray.storage.run import Run
from ddm_ray.storage.store import Store


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
    inherited = untouched(run.config, config)
    trained = {kind: [each for each in jobs if each.kind == kind] for kind in ("expert", "router", *EXTRAS)}
    for kind, members in trained.items():
        folder = "experts" if kind == "expert" else kind
        if members and folder in inherited and not _all_finished(run, members, steps):
            inherited.remove(folder)
    return Extended(_made(run, Extension(steps=steps, inherits=tuple(sorted(inherited))), steps), goes_on, anew)


def extensions(run: Run) -> list[str]:
    """URLs of the extensions of a run."""
    return [f"{run.url}/{EXTENDED}/{name}" for name in run.store.folders(EXTENDED)]


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


def _all_finished(run: Run, members: list[Artifact], steps: dict[Part, int]) -> bool:
    """True if all of a kind that isn't extended are finished, False if none was begun. Raises MissingArtifact."""
    files = list_jobs(run.store, members)
    if all(run.finished(each) for each in members):
        return True
    begun = [each for each in members if files[each].attempts]
    if begun:
        unfinished = next(each for each in members if not run.finished(each))
        part = part_of(unfinished)
        assert part
        field = f"{part}.train.steps"
        now = train_of(run.config, part).steps
        raise MissingArtifact(
            f"{run.url}/{unfinished} isn't finished, and stays at {now} steps: finish it first, or raise {field}, too",
            run.make(unfinished),
        )
    return False


def _made(run: Run, extension: Extension, steps: dict[Part, int]) -> Run:
    """The run of an extension, in the first place that is free or has this very one."""
    data = extension.to_json()
    for number in range(1, MOST + 1):
        url = f"{run.url}/{EXTENDED}/{number:04d}"
        store = Store(url)
        # Before run.json, without which it is no run: a killed command leaves none that looks like one of its own.
        if not store.create(FILE, data) and Extension.read(store) != extension:
            continue
        Run.create(url, lengthened(run.config, steps))
        return Run.open(url)
    raise StorageError(f"{run.url}/{EXTENDED}: has {MOST} extensions, and no number is left", passes=False)
