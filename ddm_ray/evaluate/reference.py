"""Features of a run's real rows, as its evaluations see them: embedded once, chunk by chunk.

Shapes: N rows, of which M are kept, CHW data, D features.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pyarrow as pa
import torch
from safetensors.numpy import load, save
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from ddm_ray.config import RunConfig
from ddm_ray.data import OnProgress
from ddm_ray.data.loading.loader import Rows
from ddm_ray.data.loading.shard_files import first_rows, num_rows
from ddm_ray.data.schema import TRAIN, as_modelled, read_parquet, stored_images
from ddm_ray.data.sharded.chunk_store import ChunkRecord, ChunkStore, StoredFile
from ddm_ray.data.sharded.stage import ShareReporter, make_chunks
from ddm_ray.data.sharded.work import Chunk, Executor
from ddm_ray.errors import DriftError
from ddm_ray.evaluate.candidates import Decode, decoder
from ddm_ray.evaluate.captions import CaptionScore
from ddm_ray.evaluate.distances import Gaussian, moments
from ddm_ray.evaluate.features import FeatureNet, load_embedder, see, train_features
from ddm_ray.models.embedders import Embedder
from ddm_ray.pictures.images import to_bytes, to_unit
from ddm_ray.run.chunk_records import ChunkKey
from ddm_ray.run.graph import Artifact, reference, shard, shards_of
from ddm_ray.run.info import ReferenceInfo, ShardInfo
from ddm_ray.run.manifest import Identity
from ddm_ray.run.run import Run

CHUNK_ROWS = 1024
"""Rows of a chunk: the most work that a kill loses."""
AT_ONCE = 64
"""Images in memory at once."""
KEPT_ROWS = 50_000
"""Maximum rows with stored features. Of a larger set this many are drawn; the moments cover all rows."""
PROBE_TOLERANCE = 0.02
"""Maximum relative difference of a probe's features between precisions and devices; other weights exceed it."""
CLASSIFIER, STATISTICS = "_classifier/CLASSIFIER.json", "_statistics/STATISTICS.json"
"""JSON objects that name the files of the classifier, and of the statistics and features that are kept."""


@dataclass(frozen=True)
class RealFeatures:
    """Features of real rows: the Gaussian of all `rows` rows, and features, labels and clusters of M kept rows."""

    features_MD: np.ndarray
    label_M: np.ndarray
    cluster_M: np.ndarray
    gaussian: Gaussian
    rows: int

    @classmethod
    def of(cls, net: FeatureNet, rows: Rows, embedder: Embedder | None = None) -> Self:
        """Features of rows in memory, as images in [-1, 1]."""
        features_MD = see(net, [rows.data_NCHW], embedder).features_ND
        return cls(features_MD, rows.label_N.numpy(), rows.cluster_N.numpy(), Gaussian.of(features_MD), len(rows))

    def to_bytes(self) -> bytes:
        """A safetensors file. Features are float32, as the networks return them."""
        every = {
            "features": self.features_MD.astype(np.float32),
            "label": self.label_M,
            "cluster": self.cluster_M,
            "mean": self.gaussian.mean_D,
            "covariance": self.gaussian.covariance_DD,
        }
        return save({name: np.ascontiguousarray(values) for name, values in every.items()})

    @classmethod
    def from_bytes(cls, data: bytes, rows: int) -> Self:
        """Read the output of `to_bytes`."""
        every = load(data)
        features_MD = every["features"].astype(np.float64)
        gaussian = Gaussian.of_moments(every["mean"], every["covariance"])
        return cls(features_MD, every["label"], every["cluster"], gaussian, rows)


@dataclass(frozen=True)
class RowsFile:
    """A unit of work: the first `rows` training rows of a shard's file, which may be all of them."""

    cluster: int
    file: str
    rows: int

    @property
    def key(self) -> str:
        return f"{shard(self.cluster)}/{self.file}"

    @property
    def bytes(self) -> int:
        return self.rows


@dataclass(frozen=True)
class ReferencePlan:
    """The files that hold the first rows of each shard that is here."""

    units: tuple[RowsFile, ...]


@dataclass(frozen=True)
class ReferenceRecord(ChunkRecord):
    """The number of a chunk's rows, and the file of their features, labels and clusters."""

    rows: int
    part: StoredFile


ReferenceStore = ChunkStore[ReferencePlan, ReferenceRecord]


@dataclass(frozen=True)
class Instruments:
    """The networks that images are measured by, and the executor that embeds real rows on `device`.

    `embedder`: gives the features; None: the classifier does. `captions`: scores how images fit their texts.
    """

    decode: Decode
    embedder: Embedder | None
    execute: Executor[ReferenceRecord]
    device: str
    captions: CaptionScore | None = None


def named(config: RunConfig, elsewhere: Iterable[int]) -> Artifact:
    """The reference in a configuration's features, of all shards except those `elsewhere`."""
    features = config.evaluate.features
    described = [features.model_dump(mode="json") if features else None, sorted(elsewhere)]
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
    return reference(f"{features.kind if features else 'classifier'}-{digest[:12]}")


def make_reference(
    run: Run, train: Rows, elsewhere: Iterable[int], by: Instruments, on_progress: OnProgress
) -> tuple[FeatureNet, RealFeatures]:
    """Embed `evaluate.real_rows` rows of the shards that aren't `elsewhere`, once.

    Returns the classifier and the features that are kept. `train`: rows in memory, as images, to fit the classifier
    to. The networks of `by`, which see the samples, must see as the networks of the real rows did. A killed call is
    resumed by calling again. Raises MissingArtifact, CorruptArtifact, DriftError, StorageError, RayError, and the
    errors of `load_embedder`.
    """
    artifact = named(run.config, elsewhere)
    chunks = ReferenceStore(run, artifact, ReferencePlan, ReferenceRecord)
    if run.finished(artifact) is None:
        _make(chunks, train, sorted(elsewhere), by, on_progress)
    net = _classifier(chunks, by.embedder, by.decode)
    data, fields = chunks.read_once(STATISTICS)
    return net, RealFeatures.from_bytes(data, fields["rows"])


def _make(chunks: ReferenceStore, train: Rows, elsewhere: list[int], by: Instruments, on_progress: OnProgress) -> None:
    run, artifact = chunks.run, chunks.artifact
    identity = run.identity(artifact)

    def planned() -> ReferencePlan:
        here = [each for each in shards_of(run.config) if each.cluster not in elsewhere]
        units = list[RowsFile]()
        for share in first_rows(run, here, TRAIN, run.config.evaluate.real_rows):
            left = share.rows
            for name in share.files:
                if not left:
                    break
                rows = min(left, num_rows(run, f"{share.manifest.artifact}/{name}"))
                units.append(RowsFile(ShardInfo.of(share.manifest).cluster, name, rows))
                left -= rows
        return ReferencePlan(tuple(units))

    def fitted() -> tuple[bytes, dict[str, Any]]:
        on_progress(0.0, "training the classifier that measures")
        classes = run.config.data.num_classes
        label_N = train.label_N if classes else train.cluster_N
        net = train_features(train.data_NCHW, label_N, classes or len(run.experts), run.config.evaluate.seed)
        weights = save_tensors({name: tensor.contiguous() for name, tensor in net.state_dict().items()})
        return weights, {"probe": _probe(run.config, net, by.embedder, by.decode)}

    plan = chunks.plan(planned, identity)
    chunks.write_once(CLASSIFIER, ".safetensors", fitted)
    observer = ShareReporter[ReferenceRecord](plan.units, on_progress, "features of real rows")
    maker = MakeReference(chunks, identity, by.device)
    records = make_chunks(chunks, plan, by.execute, ReadFile(run), maker, observer)
    data, fields = chunks.write_once(STATISTICS, ".safetensors", lambda: _statistics(chunks, records))
    chunks.delete_strays(records)
    files = {name: file for record in records for name, file in record.files.items()}
    info = ReferenceInfo(rows=fields["rows"], features=load(data)["features"].shape[1])
    run.commit_records(artifact, files, info, identity=identity)


def _statistics(chunks: ReferenceStore, records: Collection[ReferenceRecord]) -> tuple[bytes, dict[str, Any]]:
    """The file of statistics and kept features, and the number of rows."""
    total = sum(record.rows for record in records)
    kept_N = np.random.default_rng(chunks.run.config.evaluate.seed).permutation(total) < KEPT_ROWS
    kept = list[dict[str, np.ndarray]]()

    def parts() -> Iterator[np.ndarray]:
        first = 0
        for record in records:
            part = load(chunks.read(record, record.part[0]))
            own_B = kept_N[first : first + record.rows]
            kept.append({name: values[own_B] for name, values in part.items()})
            first += record.rows
            yield part["features"]

    gaussian = Gaussian.of_moments(*moments(parts()))
    every = {name: np.concatenate([part[name] for part in kept]) for name in kept[0]}
    real = RealFeatures(every["features"], every["label"], every["cluster"], gaussian, total)
    return real.to_bytes(), {"rows": total}


def _probe(config: RunConfig, net: FeatureNet, embedder: Embedder | None, decode: Decode) -> list[float]:
    """Features of a noise image: another network gives other features."""
    noise_1CHW = torch.randn((1, *config.data.shape), generator=torch.Generator().manual_seed(0))
    features: list[float] = see(net, [decode(noise_1CHW)], embedder).features_ND[0].tolist()
    return features


def _classifier(chunks: ReferenceStore, embedder: Embedder | None, decode: Decode) -> FeatureNet:
    """The fitted classifier. Raises DriftError if a network isn't the one that embedded the real rows."""
    config = chunks.run.config
    net = FeatureNet(config.data.pixel_shape[0], config.data.num_classes or len(chunks.run.experts))
    weights, fields = chunks.read_once(CLASSIFIER)
    net.load_state_dict(load_tensors(weights))
    ours, theirs = np.array(_probe(config, net.eval(), embedder, decode)), np.array(fields["probe"])
    if ours.shape != theirs.shape or np.abs(ours - theirs).max() > PROBE_TOLERANCE * np.abs(theirs).max():
        raise DriftError(
            f"{chunks.url}: was made by another network, or other weights, than evaluate.features or data.latents"
            " name now",
            chunks.run.remake(chunks.artifact),
        )
    return net


@dataclass(frozen=True)
class ReadFile:
    """The `ReadUnit` of a reference: data, labels and clusters of a file's rows, CHUNK_ROWS rows per chunk.

    Clusters are by position.
    """

    run: Run

    def __call__(self, unit: RowsFile, done: Container[int]) -> Iterator[Chunk[pa.Table]]:
        data = self.run.read(shard(unit.cluster), unit.file)
        columns = ["data", *(["label"] if self.run.config.data.text is None else [])]
        table = read_parquet(data, f"{self.run.url}/{unit.key}", columns).slice(0, unit.rows)
        place = self.run.config.partition.position(unit.cluster)
        table = table.append_column("cluster", pa.array(np.full(table.num_rows, place, np.int64)))
        for number, first in enumerate(range(0, table.num_rows, CHUNK_ROWS)):
            if number not in done:
                yield Chunk(number, table.slice(first, CHUNK_ROWS), min(1.0, (first + CHUNK_ROWS) / table.num_rows))


@dataclass(frozen=True)
class MakeReference:
    """The `ChunkMaker` of a reference."""

    chunks: ReferenceStore
    identity: Identity
    device: str

    def load(self) -> Callable[[pa.Table], dict[str, np.ndarray]]:
        """Load the networks. Raises DriftError if it was begun under another identity, and as `load_embedder`."""
        self.chunks.require_same(self.identity)
        run = self.chunks.run
        embedder, decode = load_embedder(run.config.evaluate.features, self.device), decoder(run, self.device)
        net = _classifier(self.chunks, embedder, decode)

        def embed(table: pa.Table) -> dict[str, np.ndarray]:
            data_NCHW = stored_images(table, run.config.data)
            parts = (
                decode(torch.from_numpy(as_modelled(data_NCHW[first : first + AT_ONCE])))
                for first in range(0, len(data_NCHW), AT_ONCE)
            )
            cluster_B = table["cluster"].to_numpy()
            label_B = table["label"].to_numpy() if "label" in table.column_names else np.zeros_like(cluster_B)
            if embedder is None:
                features_BD = see(net, parts).features_ND.astype(np.float32)
            else:
                features_BD = np.concatenate([embedder(to_bytes(to_unit(part_BCHW))) for part_BCHW in parts])
            return {"features": features_BD, "label": label_B.astype(np.int64), "cluster": cluster_B}

        return embed

    def store(self, key: ChunkKey, made: dict[str, np.ndarray]) -> ReferenceRecord:
        """See ChunkMaker."""
        data = save({name: np.ascontiguousarray(values) for name, values in made.items()})
        part = self.chunks.put(key, "features/", ".safetensors", data)
        return self.chunks.finish(ReferenceRecord(key=key, rows=len(made["label"]), part=part))
