"""Deriving a run from another one: what it keeps, what it continues, what it trains again, and the new run itself."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

from ddm_ray.config import InitFrom, RunConfig
from ddm_ray.config.derive import ChangeRequest, derived_config, router_stays
from ddm_ray.config.parts import train_of
from ddm_ray.errors import ConfigError, DriftError, MissingArtifact
from ddm_ray.jobs.attempts import SavedState, saved_states
from ddm_ray.run.base import FILE, Base, digest_of_config, note_derived, relative_url
from ddm_ray.run.graph import CENTROIDS, EXTRAS, PARTITION, ROUTER, ROWS, Artifact, part_of, trained_of
from ddm_ray.run.identity import fields_of, is_longer
from ddm_ray.run.inputs import beginning_of, inputs
from ddm_ray.run.inventory import every_artifact, optional
from ddm_ray.run.run import RUN_FILE, Run
from ddm_ray.store.store import Store

OTHERWISE = "begin with its weights instead (train.init_from)"
EXTENDABLE = ("constant", "inverse-sqrt")
"""Schedules of which a step's rate doesn't depend on the number of steps."""


@dataclass(frozen=True)
class Fate:
    """The fate of an artifact of the base in a derived run: it is kept, continued from a `step`, or made again."""

    word: Literal["kept", "continued", "new"]
    digest: str = ""
    step: int = 0


@dataclass(frozen=True)
class Derivation:
    """A run that may be derived from `base`: its configuration, and the fate of each artifact that it may have."""

    base: Run
    config: RunConfig
    fates: dict[Artifact, Fate]

    def of(self, word: str) -> list[Artifact]:
        """The artifacts of one fate."""
        return [artifact for artifact, fate in self.fates.items() if fate.word == word]

    @property
    def kept(self) -> dict[Artifact, str]:
        """Digests of what is kept."""
        return {artifact: fate.digest for artifact, fate in self.fates.items() if fate.word == "kept"}

    @property
    def keeps_router(self) -> bool:
        """True if the router is the base's without some rows of its head."""
        return router_stays(self.base.config, self.config)


def plan_derivation(base: Run, request: ChangeRequest) -> Derivation:
    """The run that would be derived from a run; nothing is written.

    Raises ConfigError as `derived_config`, and for more steps of a schedule that depends on their number.
    MissingArtifact if clusters change and the base has no partition, or for more steps of a job without a state.
    """
    if request.of_clusters:
        base.require(PARTITION)
        if base.config.partition.by_kmeans:
            base.require(CENTROIDS)
    has_router = ROUTER in trained_of(base.config) and base.finished(ROUTER, accepted=True) is not None
    config = derived_config(base.config, base.url, request, has_router)
    fates: dict[Artifact, Fate] = {}
    references = optional(base, "reference")
    of_base = {*every_artifact(base.config, references)}
    for artifact in every_artifact(config, references):
        fates[artifact] = _fate(base, config, artifact, fates) if artifact in of_base else Fate("new")
    _require_same_images(base, config, fates)
    return Derivation(base, config, fates)


def _require_same_images(base: Run, config: RunConfig, fates: dict[Artifact, Fate]) -> None:
    """Raise ConfigError if the images of clusters that came one by one would have to be prepared or divided again.

    One source doesn't give them: they came from several, or some have left.
    """
    pieced = bool(base.config.changes.numbered or base.config.changes.generation)
    if not pieced and not config.changes.of_clusters:
        return
    remade = pieced and not config.changes.of_clusters and fates[PARTITION].word == "new"
    if remade:
        base.require(PARTITION)
    same_rows = fields_of(base.config, ROWS) == fields_of(config, ROWS)
    if same_rows and not remade:
        return
    what = "how clusters are made" if same_rows else "how images are prepared (data, embedder)"
    raise ConfigError(
        f"{base.url}: its clusters came, or change, one by one, and {what} can't change with them: begin a new run"
        " of all images"
    )


def _fate(base: Run, config: RunConfig, artifact: Artifact, fates: dict[Artifact, Fate]) -> Fate:
    new = Fate("new")
    if any(name not in fates or fates[name].word != "kept" for name in inputs(config, artifact)):
        return new
    if not artifact.trains:
        return _kept(base, artifact) if _same(base.config, config, artifact) else new
    if artifact.cluster is not None and artifact.cluster in config.changes.retrained:
        return new
    if fields_of(base.config, artifact) == fields_of(config, artifact):
        kept = _kept(base, artifact)
        return kept if kept.word == "kept" else _continued(base, config, artifact) or new
    if not is_longer(base.config, config, artifact):
        return new
    _require_extendable(base.config, config, artifact)
    if state := _continued(base, config, artifact):
        return state
    if artifact.kind in EXTRAS or not base.finished(artifact):
        return new
    raise MissingArtifact(
        f"{base.url}/{artifact} has finished, and its last state is gone, as after garbage collection: weights alone"
        f" don't continue to the same bits. Bring it back, {OTHERWISE}, or train it again (retrain)"
    )


def _same(before: RunConfig, after: RunConfig, artifact: Artifact) -> bool:
    """True if an artifact that isn't trained is the same under both configurations."""
    changes = after.changes
    if artifact.stage == "partition" and changes.of_clusters:
        return artifact.kind == "shard" and not changes.appended and artifact.cluster not in changes.made
    if artifact == ROWS and changes.appended:
        return False
    if artifact.kind == "beginning" and _beginnings(before, artifact) != _beginnings(after, artifact):
        return False
    return fields_of(before, artifact) == fields_of(after, artifact)


def _beginnings(config: RunConfig, artifact: Artifact) -> list[InitFrom | None]:
    """The origin of the weights that jobs begin with."""
    jobs = [job for job in trained_of(config) if artifact in beginning_of(config, job)]
    return [train_of(config, part, job.cluster).init_from for job in jobs[:1] if (part := part_of(job))]


def _kept(base: Run, artifact: Artifact) -> Fate:
    manifest = base.finished(artifact, accepted=True)
    return Fate("kept", digest=manifest.digest) if manifest else Fate("new")


def _continued(base: Run, config: RunConfig, artifact: Artifact) -> Fate | None:
    """A fate by the newest state of a job in the base, or in the runs that it continues; None if there is none."""
    part = part_of(artifact)
    assert part
    steps = train_of(config, part, artifact.cluster).steps
    for run in (base, *base.predecessors(artifact)):
        for state in saved_states(run.store, artifact):
            if isinstance(state, SavedState) and state.step <= steps:
                return Fate("continued", step=state.step)
    return None


def _require_extendable(before: RunConfig, after: RunConfig, artifact: Artifact) -> None:
    """Raise ConfigError for more steps of which the first wouldn't be those that are done."""
    part = part_of(artifact)
    assert part
    done, train = (train_of(config, part, artifact.cluster) for config in (before, after))
    where = f"{part}.train"
    if train.steps < done.steps:
        new = "; for new experts alone, set experts.new.train.steps" if after.changes.made else ""
        raise ConfigError(f"{where}.steps is {done.steps} in the base, and {train.steps} are fewer: {OTHERWISE}{new}")
    if train.schedule not in EXTENDABLE:
        raise ConfigError(
            f"{where}.schedule is {train.schedule}: its rate falls towards the last step: the {done.steps} that are"
            f" done aren't the first of {train.steps}. Schedules {' and '.join(EXTENDABLE)} can be continued;"
            f" {OTHERWISE}"
        )
    if train.unmasked_steps:
        raise ConfigError(
            f"{where}.unmasked_steps is {train.unmasked_steps}: the last of {done.steps} steps saw all tokens, and of"
            f" {train.steps} they would be masked; {OTHERWISE}"
        )


def begin_derived(
    url: str,
    planned: Derivation,
    require: Callable[[RunConfig, Collection[str]], object],
    create: Callable[[str, RunConfig], object],
) -> tuple[Run, bool]:
    """Create the run, or finish what a killed call began; also whether the base could note it.

    `require` raises an error for weights that trainings would begin with, and that aren't there nor among the artifacts
    that are kept: before anything is written. `create` writes the configuration, and copies of these weights. A run
    that exists keeps its record of the base, but for the place of a base that was moved. Raises DriftError if another
    run is there.
    """
    store = Store(url)
    require_folder(store, planned.base)
    record = Base(
        url=relative_url(planned.base.url, store.url),
        configuration=digest_of_config(planned.config),
        kept={str(artifact): digest for artifact, digest in planned.kept.items()},
    )
    existing = Base.read(store)
    if existing is None and store.exists(RUN_FILE):
        raise DriftError(f"{store.url} is a run that wasn't derived from {planned.base.url}; choose another folder")
    if existing is None or not store.exists(RUN_FILE):
        require(planned.config, planned.kept)
        # The record comes before run.json: a killed call leaves no folder that looks like a run without a base.
        store.write(FILE, record.to_json())
    elif not existing.copied and existing.url != record.url and existing.configuration == record.configuration:
        _move(store, existing, record)
    create(url, planned.config)
    return Run.open(url), note_derived(planned.base.store, store.url)


def require_folder(store: Store, base: Run) -> None:
    """Raise ConfigError for a folder that is, or lies in, the base: to delete that would delete the new run, too."""
    if store.url == base.url or store.url.startswith(f"{base.url}/"):
        raise ConfigError(f"{store.url}: is or lies in the base; give the new run a folder beside it")


def _move(store: Store, existing: Base, record: Base) -> None:
    """Write the new place of a base that was moved. Raises DriftError for a base with other artifacts."""
    others = [name for name, digest in existing.kept.items() if record.kept.get(name, digest) != digest]
    if others:
        raise DriftError(f"{store.url}: was derived from {existing.url}, and {record.url} has another {others[0]}")
    store.write(FILE, existing.model_copy(update={"url": record.url}).to_json())
