"""Mending: how a damaged artifact is made whole with the least loss. One rule for all kinds of artifacts.

Only small records are ever deleted: the artifact's manifest, so that its stage runs again, and the records of the
chunks that are damaged, so that the stage makes these and no others. What is sound stays.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from ddm_ray.config.parts import train_of
from ddm_ray.errors import CorruptArtifact
from ddm_ray.jobs.attempts import SavedState, saved_states
from ddm_ray.jobs.examination import Finding, altered_file, errors_of
from ddm_ray.run.chunk_records import RECORDS, recorded_keys, stem_of_file
from ddm_ray.run.graph import Artifact, part_of
from ddm_ray.run.info import TrainedInfo
from ddm_ray.run.inputs import committed_by_stage
from ddm_ray.run.inventory import inventory
from ddm_ray.run.manifest import NAME
from ddm_ray.run.run import Run


@dataclass(frozen=True)
class Mending:
    """The way to make the artifact of a finding sound.

    `rewrites`: its files can be written again as they were, from the training state after the last step. Otherwise
    `delete`: keys of the records that are deleted first, and `make`: the artifact that is then to be made. `step`:
    for a training job, the step from which it goes on, of `steps`.
    """

    finding: Finding
    make: Artifact
    delete: tuple[str, ...]
    rewrites: bool = False
    step: int = 0
    steps: int = 0

    @property
    def made_at_once(self) -> bool:
        """True if a command without further arguments makes it, and no training."""
        owned = self.make.kind == "rows" and self.make.cluster is not None
        return self.make.stage not in ("begin", "train") and self.make.kind != "reference" and not owned


def mending(run: Run, finding: Finding, deep: bool) -> Mending | None:
    """The way to mend the artifact of a finding; None if nothing is damaged, or nothing has to be or can be done.

    `deep`: read all bytes of the training states that it may be made from. Nothing can be done for a state
    that isn't needed, charts of a training without a sound state, what was made otherwise, and what lies in the run
    that this one was derived from.
    """
    artifact = finding.artifact
    if not finding.names or any(run.inherits(f"{artifact}/{name}") for name in finding.names):
        return None
    make = committed_by_stage(run.config, artifact)
    if not artifact.trains:
        return Mending(finding, make, (f"{artifact}/{NAME}", *_records(run, artifact, finding.names)))
    states = sound_states(run, artifact, deep)
    part = part_of(artifact)
    steps = train_of(run.config, part, artifact.cluster).steps if part else 0
    step = states[0].step if states else 0
    if finding.names == (NAME,):
        return Mending(finding, make, (f"{artifact}/{NAME}",), step=step, steps=steps)
    manifest = run.manifest(artifact)
    rewrites = bool(manifest and any(state.step == TrainedInfo.of(manifest).step for state in states))
    if finding.only_charts and not rewrites:
        return None
    return Mending(finding, make, (f"{artifact}/{NAME}",), rewrites, step, steps)


def sound_states(run: Run, artifact: Artifact, deep: bool = False) -> list[SavedState]:
    """A job's training states of the run's configuration that are sound by their sizes, best first.

    `deep`: by every byte.
    """
    return [
        state
        for state in saved_states(run.store, artifact)
        if not isinstance(state, CorruptArtifact)
        and not run.drift(artifact, state.manifest.identity)
        and not (deep and altered_file(run.store, state.prefix))
    ]


def delete_records(run: Run, mended: Mending, deep: bool) -> bool:
    """Delete the records of a mending, unless the artifact is sound by now; return whether they were deleted.

    `deep`: as in the examination. Another process may have mended it, and made what must not be deleted.
    """
    if not errors_of(run, mended.finding.artifact, deep):
        return False
    for key in mended.delete:
        run.store.delete_one(key)
    return True


def drop_if_different(run: Run, artifact: Artifact) -> bool:
    """Delete the manifest of an artifact that was made again, if others were made from other bytes of it.

    What is finished isn't compared with an input that isn't, so that models stay usable though their rows are lost.
    """
    manifest = run.manifest(artifact)
    for other in inventory(run) if manifest else ():
        with suppress(CorruptArtifact):
            made = run.manifest(other)
            used = made.identity.inputs.get(artifact) if made else None
            if manifest and used is not None and used != manifest.digest:
                run.store.delete_one(f"{artifact}/{NAME}")
                return True
    return False


def needed_by(run: Run, artifact: Artifact, trained: Iterable[Artifact]) -> Artifact | None:
    """The first of these artifacts that is made from another one, directly or not; None if none is."""

    def inputs(each: Artifact) -> set[Artifact]:
        direct = {*run.inputs(each)}
        direct |= {committed_by_stage(run.config, needed) for needed in direct}
        return direct.union(*(inputs(needed) for needed in direct if needed != each))

    return next((each for each in trained if artifact in inputs(each)), None)


def _records(run: Run, artifact: Artifact, names: Iterable[str]) -> list[str]:
    """Keys of the records of the chunks that have these files, and of the records among them."""
    stems = {stem_of_file(name) for name in names} - {None}
    chunks = [f"{RECORDS}/{key.record_name}" for key in recorded_keys(run.store, artifact) if key.stem in stems]
    own = [name for name in names if name.startswith("_") and name.endswith(".json") and name != NAME]
    return [f"{artifact}/{name}" for name in dict.fromkeys([*chunks, *own])]
