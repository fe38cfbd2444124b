"""Resuming: the newest sound state of a job, from whichever attempt it is, in a new engine."""

import gc
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.distributed as dist

from ddm_ray.errors import CorruptArtifact, DriftError, StorageError
from ddm_ray.jobs.attempts import saved_states
from ddm_ray.run.info import StateInfo
from ddm_ray.run.manifest import NAME, read_manifest
from ddm_ray.spelling import shell_line
from ddm_ray.store.store import Store
from ddm_ray.train import state
from ddm_ray.train.membership import Membership
from ddm_ray.train.ranks import decide_on_first, gather_objects
from ddm_ray.train.state import TrainProgress

if TYPE_CHECKING:
    from ddm_ray.train.engine import Engine


def resume_training(
    membership: Membership, make_empty: Callable[[], "Engine"], make_first: Callable[[], "Engine"]
) -> tuple["Engine", TrainProgress]:
    """An engine that holds the newest sound state, and that state's progress; without a state the beginning.

    `make_empty` makes an engine to read a state into, `make_first` one with the weights that training begins with. A
    damaged state is named on stderr, and the one before it used. StorageError if all states were deleted meanwhile: a
    newer attempt deletes those that it has overtaken. RuntimeError if the engine doesn't hold what the state says.
    """
    choice, engine, gone = StateChoice(membership), None, False
    while (chosen := decide_on_first(choice.next_state)) is not None:
        store, prefix = membership.lineage[chosen[0]].store, chosen[1]
        engine, problem = engine or make_empty(), None
        try:
            saved, progress = _read(engine, store, prefix)
        except CorruptArtifact as error:
            problem = str(error)
        if not any(problems := gather_objects(problem)):
            _load(engine, saved, progress.step)
            return engine, progress
        if decide_on_first(lambda store=store, prefix=prefix: store.exists(f"{prefix}/{NAME}")):  # type: ignore[misc]
            choice.warn(next(filter(None, problems)))
        else:
            gone = True
    if gone:
        raise StorageError(f"{membership.job.artifact}: its states were deleted while they were read")
    if engine:
        # It holds parts of a damaged state. Two engines may not fit into memory, so that it is closed first.
        engine.close()
        del engine
        gc.collect()
    return make_first(), TrainProgress(0, 0.0, {"loss": [], "grad_norm": []})


class StateChoice:
    """Rank 0's choice among the states of a job, and of the runs that its run extends: the best first, each once."""

    def __init__(self, membership: Membership):
        self._membership = membership
        self._tried: set[str] = set()

    def next_state(self) -> tuple[int, str] | None:
        """Place in the lineage and key prefix of the best state that wasn't tried; None if there is none left.

        The run's own states come before those of the runs that it extends. DriftError for a state of another
        configuration.
        """
        artifact = self._membership.job.artifact
        for generation, run in enumerate(self._membership.lineage):
            identity = run.identity(artifact) if generation else self._membership.identity
            for saved in saved_states(run.store, artifact):
                if isinstance(saved, CorruptArtifact):
                    self.warn(str(saved))
                elif (where := f"{run.store.url}/{saved.prefix}") not in self._tried:
                    if lines := run.drift(artifact, saved.manifest.identity, identity):
                        fix = f"delete {shell_line(f'{run.store.url}/{artifact}')}"
                        raise DriftError(f"{where} was made otherwise: {'; '.join(lines)}", fix)
                    self._tried.add(where)
                    return generation, saved.prefix
        return None

    def warn(self, text: str) -> None:
        """Say once, on rank 0, that a state isn't used."""
        if dist.get_rank() == 0 and text not in self._tried:
            self._tried.add(text)
            print(f"warning: {text}; going on from the state before it", file=sys.stderr)


def _read(engine: "Engine", store: Store, prefix: str) -> tuple[state.SavedParts, TrainProgress]:
    """Read this rank's part into the engine's shards."""
    where = f"{store.url}/{prefix}/{NAME}"
    try:
        manifest = read_manifest(store, prefix)
    except FileNotFoundError:
        raise CorruptArtifact(f"{where}: gone") from None
    saved = state.SavedParts(store, prefix, manifest)
    saved.fill(engine.shards.held())
    curve = state.read_curve(saved.read(state.CURVE)) if dist.get_rank() == 0 else {}
    info = StateInfo.of(manifest)
    return saved, TrainProgress(info.step, info.seconds, curve)


def _load(engine: "Engine", saved: state.SavedParts, step: int) -> None:
    """Make the engine compute with the shards that were read, all ranks together, and check that it does."""
    engine.shards.refresh()
    engine.set_adam_step(step)
    prints = gather_objects(state.fingerprints(engine.shards.owned()))
    total = {record: sum(one[record] for one in prints) % 2**64 for record in saved.fingerprints}
    wrong = [record for record, value in saved.fingerprints.items() if total[record] != value]
    wrong += engine.shards.computing_otherwise()
    if wrong:
        raise RuntimeError(f"state of step {step} didn't load: {wrong[0]} differs from what was saved")
