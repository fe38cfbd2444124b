"""Restoring a finished job without training: its files from a state, and its manifest from its published weights.

What is restored has the digest that it had, so that all that was made from it stays valid.
"""

from collections.abc import Collection, Iterator
from contextlib import suppress

from ddm_ray.errors import CorruptArtifact
from ddm_ray.jobs.attempts import CURVE, WEIGHTS, Attempt, folders_of, step_of
from ddm_ray.jobs.examination import altered_file
from ddm_ray.jobs.mending import sound_states
from ddm_ray.run.graph import Artifact
from ddm_ray.run.info import StateInfo, TrainedInfo
from ddm_ray.run.manifest import NAME, FileRecord, Manifest, read_manifest, read_verified
from ddm_ray.run.run import Run
from ddm_ray.train.job import own_buffers, train_job
from ddm_ray.train.publish import WEIGHTS as EMA_FILE
from ddm_ray.train.publish import commit_job, weights_of
from ddm_ray.train.state import SavedParts, TrainProgress, read_curve


def restore_files(run: Run, artifact: Artifact, names: Collection[str]) -> bool:
    """Write these files of a finished job again, from a state of its last step.

    Returns False if no state gives the very bytes that the manifest records.
    """
    manifest, job, left = run.manifest(artifact), train_job(run, artifact), {*names}
    assert manifest
    info = TrainedInfo.of(manifest)
    for state in sound_states(run, artifact):
        if state.step != info.step:
            continue
        with suppress(CorruptArtifact):
            parts = SavedParts(run.store, state.prefix, state.manifest)
            counted, files = weights_of(job, parts, own_buffers(job.build(filled=False)))
            for name, data in files.items():
                key = f"{info.weights}/{name}"
                if key in left and FileRecord.of(data) == manifest.files[key]:
                    run.store.write(f"{artifact}/{key}", data)
                    left.remove(key)
            key = f"{info.weights}/{EMA_FILE}"
            if key in left and counted.measured() == manifest.files[key]:
                run.store.write_stream(f"{artifact}/{key}", lambda source=counted: source)  # type: ignore[misc]
                left.remove(key)
    return not left


def restore_manifest(run: Run, artifact: Artifact) -> bool:
    """Commit a job again by the weights that it published after its last step: its manifest can't be read.

    Returns False if no such weights are sound. Versions are those of now, and without a state the time is 0.
    """
    job = train_job(run, artifact)
    for attempt, published in _published(run, artifact, job.train.steps):
        with suppress(CorruptArtifact, FileNotFoundError):
            folder = attempt.weights_prefix(job.train.steps)
            if altered_file(run.store, folder):
                continue
            curve = read_curve(read_verified(run.store, f"{folder}/{CURVE}", published.files[CURVE]))
            times = [StateInfo.of(each.manifest).seconds for each in sound_states(run, artifact)]
            last = TrainProgress(job.train.steps, max(times, default=0.0), curve)
            run.store.delete_one(f"{artifact}/{NAME}")
            commit_job(run, attempt, job, published.identity, published, last)
            return True
    return False


def _published(run: Run, artifact: Artifact, step: int) -> Iterator[tuple[Attempt, Manifest]]:
    """The attempts that have published weights after this step, first ones first, with the weights' manifests."""
    for number, name in sorted(folders_of(run.store, artifact, WEIGHTS, unnamed=False)):
        attempt = Attempt(run.store, artifact, number)
        with suppress(CorruptArtifact, FileNotFoundError):
            if step_of(name) == step:
                manifest = read_manifest(run.store, attempt.weights_prefix(step))
                if not run.drift(artifact, manifest.identity):
                    yield attempt, manifest
