"""Replay: images that an expert samples, to train the router on instead of rows, which stay with their owner.

Generative replay (Shin et al. 2017, arXiv 1705.08690): an expert's samples stand for its cluster. From the rows only
the partition's counts are used. Shapes: B images of a portion, CHW image, C classes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from ddm_ray.config import RunConfig
from ddm_ray.core.streams import REPLAY, SeedPurpose, consecutive_seeds, stream
from ddm_ray.data import OnProgress, no_progress
from ddm_ray.data.schema import TRAIN, column, data_dtype, shard_schema, to_parquet
from ddm_ray.data.sharded.chunk_store import ChunkRecord, ChunkStore, StoredFile
from ddm_ray.data.sharded.stage import ShareReporter, make_chunks
from ddm_ray.data.sharded.work import Executor, read_whole
from ddm_ray.run.chunk_records import ChunkKey
from ddm_ray.run.graph import PARTITION, expert, replay
from ddm_ray.run.info import PartitionInfo, ShardInfo
from ddm_ray.run.inventory import require_replay
from ddm_ray.run.manifest import Identity, Manifest
from ddm_ray.run.run import Run
from ddm_ray.sampling import driver
from ddm_ray.sampling.request import SampleRequest
from ddm_ray.sampling.run_models import expert_info, load_trained

PORTION, BATCH = 1024, 256
"""Images of a file, and images that are sampled at once."""


@dataclass(frozen=True)
class ReplayPortion:
    """Consecutive images of one expert, of these classes, from the `first` on: a unit of work."""

    first: int
    labels: tuple[int, ...]

    @property
    def key(self) -> str:
        return f"images {self.first} to {self.first + len(self.labels) - 1}"

    @property
    def bytes(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class ReplayPlan:
    """The images of one expert, in portions."""

    units: tuple[ReplayPortion, ...]


@dataclass(frozen=True)
class ReplayRecord(ChunkRecord):
    """A portion's images: their number and their file."""

    images: int
    part: StoredFile


ReplayStore = ChunkStore[ReplayPlan, ReplayRecord]


def make_replay(
    run: Run, cluster: int, execute: Executor[ReplayRecord], on_progress: OnProgress = no_progress, device: str = "cpu"
) -> Manifest:
    """Sample the images of one cluster's expert for the run's router; a no-op if they are finished.

    The number of images and their classes are in proportion to the cluster's rows. After a kill a second call
    continues. Raises ConfigError if the run's router is trained on rows, and MissingArtifact, CorruptArtifact,
    DriftError, StorageError, RayError.
    """
    artifact = replay(cluster)
    require_replay(run)
    if finished := run.finished(artifact):
        return finished
    for needed in run.inputs(artifact):
        run.require(needed)
    identity, chunks = run.identity(artifact), ChunkStore(run, artifact, ReplayPlan, ReplayRecord)
    plan = chunks.plan(lambda: _planned(run, cluster))
    maker = MakeReplay(chunks, identity, device)
    records = make_chunks(
        chunks, plan, execute, read_whole, maker, ShareReporter(plan.units, on_progress, "asking the expert")
    )
    chunks.delete_strays(records)
    labels_N = [label for unit in plan.units for label in unit.labels]
    counts_C = np.bincount(np.array(labels_N, np.int64), minlength=len(run.config.data.class_names))
    info = ShardInfo(
        cluster=cluster,
        rows=len(labels_N),
        rows_train=len(labels_N),
        rows_heldout=0,
        counts_C=tuple(counts_C.tolist()),
        data_std=None,
        centroids=None,
    )
    files = {name: file for record in records for name, file in record.files.items()}
    return run.commit_records(artifact, files, info, identity=identity)


def images_of(run: Run, cluster: int) -> range:
    """Numbers of a cluster's images among the images of all experts, by the clusters' shares of the rows."""
    rows_K, position = np.array(PartitionInfo.of(run.require(PARTITION)).rows_K), run.config.partition.position(cluster)
    ends_K = np.rint(run.config.router.replay * rows_K.cumsum() / max(1, rows_K.sum())).astype(int)
    return range(int(ends_K[position - 1]) if position else 0, int(ends_K[position]))


def _planned(run: Run, cluster: int) -> ReplayPlan:
    numbers = images_of(run, cluster)
    counts_C = np.array(PartitionInfo.of(run.require(PARTITION)).counts_CK)[:, run.config.partition.position(cluster)]
    draws = stream(run.config.router.train.seed, REPLAY, cluster)
    label_N = draws.choice(len(counts_C), len(numbers), p=counts_C / counts_C.sum()).tolist() if numbers else []
    firsts = range(0, len(numbers), PORTION)
    return ReplayPlan(tuple(ReplayPortion(numbers[first], tuple(label_N[first : first + PORTION])) for first in firsts))


def replay_request(config: RunConfig, portion: ReplayPortion) -> SampleRequest:
    """The request for a portion's images: by the expert alone, without guidance, which would sharpen its classes."""
    settings = config.sample.changed(strategy="once", guidance_scale=1.0)
    (begin,) = consecutive_seeds(config.router.train.seed, 1, SeedPurpose.REPLAY)
    first = begin + portion.first
    return SampleRequest(tuple(range(first, first + len(portion.labels))), torch.tensor(portion.labels), settings)


@dataclass(frozen=True)
class MakeReplay:
    """The `ChunkMaker` of replay."""

    chunks: ReplayStore
    identity: Identity
    device: str

    def load(self) -> Callable[[ReplayPortion], pa.Table]:
        """Load the expert. Raises DriftError if it isn't the one of the first images."""
        run, cluster = self.chunks.run, self.chunks.artifact.cluster
        self.chunks.require_same(self.identity)
        assert cluster is not None
        info, network = expert_info(run, cluster), load_trained(run, expert(cluster), self.device)

        def sample(portion: ReplayPortion) -> pa.Table:
            request, parts = replay_request(run.config, portion), list[Tensor]()
            for first in range(0, len(portion.labels), BATCH):
                rows = slice(first, first + BATCH)
                part = SampleRequest(request.seeds[rows], request.condition[rows], request.settings)
                parts.append(driver.sample(part, info, (network,), None, self.device).images_BCHW.cpu())
            return _table(run.config, cluster, portion, torch.cat(parts))

        return sample

    def store(self, key: ChunkKey, made: pa.Table) -> ReplayRecord:
        """See ChunkMaker."""
        part = self.chunks.put(key, f"{TRAIN}-", ".parquet", to_parquet(made))
        return self.chunks.finish(ReplayRecord(key=key, images=made.num_rows, part=part))


def _table(config: RunConfig, cluster: int, portion: ReplayPortion, image_BCHW: Tensor) -> pa.Table:
    """Images in the form of a shard's rows."""
    dtype = data_dtype(config.data)
    if dtype == np.uint8:
        image_BCHW = ((image_BCHW + 1) * 127.5).round().clamp(0, 255)
    columns = {
        "id": [f"replay/{cluster:03d}/{portion.first + place:09d}" for place in range(len(image_BCHW))],
        "data": column(image_BCHW.numpy(), dtype),
        "label": list(portion.labels),
    }
    return pa.table(columns, schema=shard_schema(config.data.unaugmented))
