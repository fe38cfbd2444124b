"""Many experts as their training leaves them on storage: finished, in mid-training, or not begun."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ddm_ray.config import load_recipe
from ddm_ray.jobs.attempts import Attempt, claim
from ddm_ray.run.graph import PARTITION, REPORT, ROWS, Artifact, shard
from ddm_ray.run.manifest import FileRecord, Identity, Manifest
from ddm_ray.run.run import Run
from tests.infos import commit_written, info_of
from tests.jobs.attempts import beat, fail
from tests.run.artifacts import write_and_commit

ATTEMPTS, RANKS, STATES, CURVES = 3, 8, 2, 4
RECORDS = ("weights", "adam-mean", "adam-square", "ema")
WRITERS = 16


def make_fleet(url: str, experts: int, training: int, finished: int) -> Run:
    """A run of so many experts, of which the first are finished and the next ones train, each in its third attempt."""
    sizes = ("partition.num_clusters", "partition.num_fine")
    run = Run.create(url, load_recipe("tiny", tuple(f"{size}={experts}" for size in sizes)))
    write_and_commit(run, ROWS, {"part-0.parquet": b"rows"})
    _each(shard, experts, lambda rows: write_and_commit(run, rows, {"part-0.parquet": rows.encode()}))
    write_and_commit(run, PARTITION, {"centroids.safetensors": b"centroids"})
    write_and_commit(run, REPORT, {"report.html": b"<html>"})

    def train(artifact: Artifact) -> None:
        for number in range(ATTEMPTS):
            attempt = claim(run.store, artifact)
            beat(attempt, 1, 100 * number + 75)
            for curve in range(CURVES):
                run.store.write(f"{attempt.prefix}/tensorboard/events.{curve:06d}", b"curve")
            if number < ATTEMPTS - 1:
                fail(attempt, "a worker was lost")
                run.store.write(f"{artifact}/launches/a/failures/{number:04d}", b"")
        ends = artifact.cluster is not None and artifact.cluster < finished
        for step in range(1 if ends else STATES):
            _save(attempt, 100 * (step + 1))
        if ends:
            weights = f"attempts/{attempt.number:04d}/weights/step-000000300/ema.safetensors"
            run.store.write(f"{artifact}/{weights}", b"weights")
            info = {"step": 300, "loss": 0.25, "training_flops": 1e9, "attempts": ATTEMPTS}
            commit_written(run, artifact, [weights], info_of(artifact, **info))

    _each(lambda cluster: run.experts[cluster], finished + training, train)
    return run


def _save(attempt: Attempt, step: int) -> None:
    """A state of all ranks."""
    prefix = attempt.state_prefix(step)
    names = [f"rank-{rank:03d}/{record}-0000.safetensors" for rank in range(RANKS) for record in RECORDS]
    names += [f"rank-{rank:03d}/INDEX.json" for rank in range(RANKS)] + ["curve.safetensors"]
    for name in names:
        attempt.store.write(f"{prefix}/{name}", b"state")
    records = {name: FileRecord.of(b"state") for name in names}
    attempt.store.write(f"{prefix}/_MANIFEST.json", Manifest(prefix, Identity({}), records, {}).to_json())


def _each(artifact_of: Callable[[int], Artifact], many: int, work: Callable[[Artifact], None]) -> None:
    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(lambda index: work(artifact_of(index)), range(many)))
