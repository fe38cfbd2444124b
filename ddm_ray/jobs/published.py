"""Weights that training jobs have published, at their end and before it."""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from ddm_ray.errors import CorruptArtifact, DriftError
from ddm_ray.jobs.attempts import Attempt
from ddm_ray.jobs.damage import REQUESTS
from ddm_ray.jobs.job_files import JobFiles, list_jobs
from ddm_ray.run.graph import Artifact
from ddm_ray.run.info import TrainedInfo
from ddm_ray.run.manifest import FileRecord, read_manifest, read_verified
from ddm_ray.run.run import Run
from ddm_ray.spelling import one_line


@dataclass(frozen=True)
class Weights:
    """EMA weights of a training job after `step` steps, in the folder `prefix` below its artifact.

    `final`: the job has finished with these weights. It doesn't affect equality. `run`: URL of the run that they lie
    in; empty: not noted. So weights that a derived run keeps are equal to its base's, and others of the name aren't.
    """

    artifact: Artifact
    prefix: str
    step: int
    final: bool = field(compare=False)
    run: str = ""

    @classmethod
    def finished(cls, run: Run, artifact: Artifact) -> "Weights":
        """The weights of a finished job. Raises MissingArtifact, DriftError and CorruptArtifact."""
        info = TrainedInfo.of(run.require(artifact))
        return cls(artifact, info.weights, info.step, final=True, run=run.holder(artifact).url)

    def read(self, run: Run, most: Mapping[str, int]) -> list[bytes]:
        """Read and verify files by name, each with at most as many bytes as `most` says.

        Raises CorruptArtifact, and DriftError for weights of another configuration.
        """
        if self.final:
            finished = run.require(self.artifact)
            records = {name: finished.files.get(f"{self.prefix}/{name}") for name in most}
            self.require_small(run, records, most)
            return [run.read(self.artifact, f"{self.prefix}/{name}", finished) for name in most]
        folder = f"{self.artifact}/{self.prefix}"
        where = f"{run.url}/{folder}"
        try:
            manifest = read_manifest(run.store, folder)
            if lines := run.drift(self.artifact, manifest.identity):
                raise DriftError(f"{where} was made otherwise: {lines[0]}", run.remake(self.artifact))
            if unlisted := most.keys() - manifest.files.keys():
                raise CorruptArtifact(f"{where}/{min(unlisted)}: its manifest doesn't list it")
            self.require_small(run, manifest.files, most)
            return [read_verified(run.store, f"{folder}/{name}", manifest.files[name]) for name in most]
        except FileNotFoundError as error:
            raise CorruptArtifact(f"{where}: not whole any more: {one_line(error, 300)}") from None

    def require_small(self, run: Run, records: Mapping[str, FileRecord | None], most: Mapping[str, int]) -> None:
        """Raise CorruptArtifact if a recorded size is larger than the network allows."""
        for name, limit in most.items():
            if (record := records.get(name)) and record.bytes > limit:
                where = f"{run.url}/{self.artifact}/{self.prefix}/{name}"
                raise CorruptArtifact(f"{where}: has {record.bytes} bytes, and the run's network {limit} at most")


def published(run: Run, artifacts: Iterable[Artifact]) -> dict[Artifact, list[Weights]]:
    """All published weights of each job, best first: the final ones, then by descending step. They aren't read.

    For artifacts that are accepted by hand, only accepted weights. Raises DriftError and CorruptArtifact for a job that
    was finished under another configuration or is damaged.
    """
    jobs = list_jobs(run.store, artifacts)
    with ThreadPoolExecutor(REQUESTS) as pool:  # in a bucket each waits for two requests, if it has finished
        return dict(zip(jobs, pool.map(partial(_of, run), jobs, jobs.values()), strict=True))


def all_finished(run: Run, artifacts: Sequence[Artifact]) -> dict[Artifact, Weights]:
    """The weights of finished jobs. Raises MissingArtifact, DriftError and CorruptArtifact for the first that isn't."""
    with ThreadPoolExecutor(REQUESTS) as pool:
        return dict(zip(artifacts, pool.map(partial(Weights.finished, run), artifacts), strict=True))


def _of(run: Run, artifact: Artifact, files: JobFiles) -> list[Weights]:
    if run.by_hand(artifact):
        return [Weights.finished(run, artifact)] if run.finished(artifact, accepted=True) else []
    last = [Weights.finished(run, artifact)] if files.committed else []
    by_step = sorted(files.weights, key=lambda each: (each[1], each[0]), reverse=True)
    others = [
        Weights(
            artifact,
            Attempt(run.store, artifact, attempt).weights_prefix(step).removeprefix(f"{artifact}/"),
            step,
            final=False,
            run=run.holder(artifact).url,
        )
        for attempt, step in by_step
    ]
    return [*last, *(each for each in others if each not in last)]
