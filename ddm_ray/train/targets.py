"""Targets: a teacher's predictions at all places of a student's training that are its cluster's, kept on storage.

An island makes them of its own rows by its own expert; the student's island then needs no teacher. Which rows come
when, and with which noise and time, is a function of the seed and the step alone, so both sides know it. Shapes: M
places of one cluster in a range of steps, CHW image.
"""

import atexit
import math
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from ddm_ray.core.transfer import frozen_dtype, sent
from ddm_ray.data import OnProgress, no_progress
from ddm_ray.data.loading.loader import Loader
from ddm_ray.data.loading.shard_files import null_text_of
from ddm_ray.data.sharded.chunk_store import ChunkRecord, ChunkStore, StoredFile
from ddm_ray.data.sharded.stage import ShareTold, make_chunks
from ddm_ray.data.sharded.work import Chunk, Executor
from ddm_ray.data.text_encoding import StoredTexts
from ddm_ray.errors import ConfigError, DriftError
from ddm_ray.placement import TrainPlacement
from ddm_ray.storage.chunk_records import ChunkKey
from ddm_ray.storage.graph import STUDENT, Artifact, shard, targets
from ddm_ray.storage.info import TargetsInfo
from ddm_ray.storage.manifest import Identity, Manifest
from ddm_ray.storage.run import Run
from ddm_ray.train.batches import batch_of, draws_of, on_device
from ddm_ray.train.job import TrainJob, train_job
from ddm_ray.train.objectives import Batch
from ddm_ray.train.teachers import load_teachers

CHUNK_BYTES = 16 * 2**20
"""Size that is aimed at, of the rows whose targets are made into one file: the targets are a third of it at most."""
HELD_RANGES = 2


@dataclass(frozen=True)
class Steps:
    """Consecutive steps of a student's training: a unit of work."""

    first: int
    count: int

    @property
    def key(self) -> str:
        return f"steps {self.first} to {self.first + self.count - 1}"

    @property
    def bytes(self) -> int:
        return self.count


@dataclass(frozen=True)
class TargetsPlan:
    """The steps of a student's training, in ranges."""

    units: tuple[Steps, ...]


@dataclass(frozen=True)
class TargetsRecord(ChunkRecord):
    """The targets of a range of steps: how many, and their file."""

    rows: int
    part: StoredFile


@dataclass(frozen=True)
class Places:
    """Positions of a cluster's rows in some steps, step * batch + place of each, ascending; and a batch a step."""

    position_M: Tensor
    batches: list[Batch]


def make_targets(
    run: Run,
    cluster: int,
    execute: Executor[TargetsRecord],
    on_progress: OnProgress = no_progress,
    device: str = "cpu",
    steps_each: int | None = None,
) -> Manifest:
    """Make the targets of one cluster's expert for the run's student; a no-op if they are finished.

    Killed at any moment, called again it goes on. `steps_each`: steps of a file; None: those that fill CHUNK_BYTES.
    Raises ConfigError for a student that isn't taught by its rows' own experts; MissingArtifact, CorruptArtifact,
    DriftError, StorageError, RayError.
    """
    artifact = targets(cluster)
    require_labelled(run)
    if finished := run.finished(artifact):
        return finished
    for needed in run.inputs(artifact):
        run.require(needed)
    identity = run.identity(artifact)
    job, chunks = train_job(run, STUDENT), ChunkStore(run, artifact, TargetsPlan, TargetsRecord)

    def planned() -> TargetsPlan:
        each = steps_each or max(1, CHUNK_BYTES * len(run.experts) // (job.batch * _row_bytes(run, job)))
        firsts = range(0, job.train.steps, each)
        return TargetsPlan(tuple(Steps(first, min(each, job.train.steps - first)) for first in firsts))

    plan = chunks.plan(planned)
    observer = ShareTold[TargetsRecord](plan.units, on_progress, "asking the expert")
    maker = MakeTargets(chunks, identity, device)
    try:
        records = make_chunks(chunks, plan, execute, ReadPlaces(run.url, cluster), maker, observer)
    finally:
        _rows.close()  # what was read in this process; others close theirs when they end
    chunks.require_complete(plan, records)
    chunks.delete_strays(records)
    files = {name: record for each in records for name, record in each.files.items()}
    rows, firsts = sum(record.rows for record in records), tuple(unit.first for unit in plan.units)
    return run.commit_records(artifact, files, TargetsInfo(rows=rows, first_steps=firsts), identity=identity)


def require_labelled(run: Run) -> None:
    """Raise ConfigError for a student whose targets can't be made cluster by cluster."""
    if run.config.student.teacher != "label":
        raise ConfigError(
            f"student.teacher is {run.config.student.teacher}, which asks several experts about a row: targets are"
            " those of a row's own expert (student.teacher label)"
        )


def needed_by(run: Run, artifact: Artifact, placement: TrainPlacement) -> tuple[Artifact, ...]:
    """The artifacts that have to be finished before this one can be trained so: its inputs, and stored targets.

    A student that can't have any needs none: its training says so.
    """
    stored = artifact == STUDENT and placement.teachers == "stored" and run.config.student.teacher == "label"
    return (*run.inputs(artifact), *(map(targets, range(len(run.experts))) if stored else ()))


def targets_bytes(run: Run) -> int:
    """Bytes of all clusters' targets together, in fp32."""
    job = train_job(run, STUDENT)
    return job.train.steps * job.batch * 4 * math.prod(job.image_shape)


def _row_bytes(run: Run, job: TrainJob) -> int:
    """Bytes of a row on its way: its data, noise and target, and its text, in fp32."""
    text = run.config.data.text
    condition = 0 if text is None else text.channels
    return 4 * (3 * math.prod(job.image_shape) + condition)


@dataclass(frozen=True)
class ReadPlaces:
    """The `ReadUnit` of targets: a cluster's rows in a range of steps, with their noise, times and conditions."""

    url: str
    cluster: int

    def __call__(self, unit: Steps, done: Container[int]) -> Iterator[Chunk[Places]]:
        if 0 not in done:
            job, loader = _rows.of(self.url, self.cluster)
            yield Chunk(0, self._places(unit, job, loader), 1.0)

    def _places(self, unit: Steps, job: TrainJob, loader: Loader) -> Places:
        place_B, positions, batches = torch.arange(job.batch), [torch.zeros(0, dtype=torch.long)], []
        for step in range(unit.first, unit.first + unit.count):
            own_M = place_B[loader.cluster_B(step, place_B) == self.cluster]
            if len(own_M):
                positions.append(step * job.batch + own_M)
                batches.append(batch_of(job, loader, step, own_M, draws_of(job, step)))
        return Places(torch.cat(positions), batches)


class _OpenRows:
    """The student's job, and its rows of one cluster, as long as a process reads these."""

    def __init__(self) -> None:
        self._opened: tuple[str, int, TrainJob, Loader] | None = None

    def of(self, url: str, cluster: int) -> tuple[TrainJob, Loader]:
        """Open those of a cluster of a run, once; what was open before is closed."""
        if self._opened is None or self._opened[:2] != (url, cluster):
            self.close()
            run = Run.open(url)
            job = train_job(run, STUDENT)
            # Streamed: there are as many such processes as cores.
            rows = Loader(run, job.shards, job.train.seed, job.batch, rows_gib=0, only=shard(cluster))
            self._opened = url, cluster, job, rows
        return self._opened[2:]

    def close(self) -> None:
        """End the thread that reads, and remove a temporary copy."""
        if self._opened is not None:
            self._opened[3].close()
        self._opened = None


_rows = _OpenRows()
atexit.register(_rows.close)


@dataclass(frozen=True)
class MakeTargets:
    """The `ChunkMaker` of targets."""

    chunks: ChunkStore[TargetsPlan, TargetsRecord]
    identity: Identity
    device: str

    def load(self) -> Callable[[Places], dict[str, Tensor]]:
        """Load the expert; what it predicts goes to storage in the precision that it computes in.

        Raises DriftError if it isn't the one that these targets were begun with.
        """
        run, cluster, device = self.chunks.run, self.chunks.artifact.cluster, torch.device(self.device)
        self.chunks.require_same(self.identity)
        assert cluster is not None
        null_text = null_text_of(run, shard(cluster))
        teachers = load_teachers(run, null_text, device, only=cluster)
        texts = StoredTexts.of(run, shard(cluster), device)
        dtype = frozen_dtype(device)

        def predict(places: Places) -> dict[str, Tensor]:
            predicted = [torch.zeros(0, *run.config.data.shape, dtype=dtype)]
            for batch in places.batches:
                taught = teachers.taught(on_device(batch, device, texts), cluster_B=batch.cluster_B).teacher_BCHW
                assert taught is not None
                predicted.append(taught.to("cpu", dtype))
            return {"position": places.position_M, "target": torch.cat(predicted)}

        return predict

    def store(self, key: ChunkKey, made: dict[str, Tensor]) -> TargetsRecord:
        """See ChunkMaker."""
        part = self.chunks.put(key, "targets-", ".safetensors", save(made))
        return self.chunks.finish(TargetsRecord(key=key, rows=len(made["position"]), part=part))


class StoredTargets:
    """The teacher of a student whose targets are on storage: reads what comes next while it is trained.

    Raises ConfigError for a student that isn't taught by its rows' own experts, MissingArtifact for a cluster without
    targets, DriftError for those of another expert; reading raises CorruptArtifact for a file that was altered.
    """

    by_cluster = False

    def __init__(self, run: Run, batch: int):
        require_labelled(run)
        self._run, self._batch = run, batch
        self._manifests = [run.require(targets(cluster)) for cluster in range(len(run.experts))]
        self._files = [sorted(manifest.files) for manifest in self._manifests]
        firsts = [TargetsInfo.of(manifest).first_steps for manifest in self._manifests]
        for cluster, other in enumerate(firsts):
            if other != firsts[0]:
                artifact = targets(cluster)
                raise DriftError(f"{artifact} has other steps in its files than {targets(0)}", run.remake(artifact))
        self._firsts = np.array(firsts[0])
        self._thread = ThreadPoolExecutor(1, "targets")
        self._ranges: OrderedDict[int, Future[tuple[Tensor, Tensor]]] = OrderedDict()

    def close(self) -> None:
        """End the thread that reads."""
        self._thread.shutdown(cancel_futures=True)

    def await_step(self, step: int) -> None:
        """Wait until what this step needs is read; that of the next ones is begun."""
        number = self._number(step)
        self._range(number).result()
        if number + 1 < len(self._firsts):
            self._range(number + 1)

    def taught(self, batch: Batch, step: int, place_B: Tensor, cluster_B: Tensor) -> Batch:
        """The batch, which is that of these places of a step, with its teacher's predictions."""
        position_N, target_NCHW = self._range(self._number(step)).result()
        position_B = step * self._batch + place_B
        index_B = torch.searchsorted(position_N, position_B)
        assert torch.equal(position_N[index_B], position_B)
        data_BCHW = batch.data_BCHW
        return replace(batch, teacher_BCHW=sent(target_NCHW[index_B], data_BCHW.device).to(data_BCHW.dtype))

    def _number(self, step: int) -> int:
        return int(np.searchsorted(self._firsts, step, side="right")) - 1

    def _range(self, number: int) -> "Future[tuple[Tensor, Tensor]]":
        """The targets of a range of steps; the one used longest ago makes room."""
        if number not in self._ranges:
            while len(self._ranges) >= HELD_RANGES:
                self._ranges.popitem(last=False)
            self._ranges[number] = self._thread.submit(self._read, number)
        self._ranges.move_to_end(number)
        return self._ranges[number]

    def _read(self, number: int) -> tuple[Tensor, Tensor]:
        """All clusters' positions, ascending, and targets."""
        parts = [
            load(self._run.read(Artifact(manifest.artifact), files[number], manifest))
            for manifest, files in zip(self._manifests, self._files, strict=True)
        ]
        position_N, order_N = torch.cat([part["position"] for part in parts]).sort()
        return position_N, torch.cat([part["target"] for part in parts])[order_N]
