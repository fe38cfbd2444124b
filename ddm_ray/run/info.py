"""Typed records in the manifests of each kind of artifact, parsed once.

Shapes: C classes, K clusters. The order of fields is their order in the manifest's bytes.
"""

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ddm_ray.errors import CorruptArtifact
from ddm_ray.run.manifest import Manifest
from ddm_ray.spelling import printable

Count = Annotated[int, Field(ge=0, lt=2**53)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class Info(BaseModel):
    """A record that a manifest holds. Fields of later versions are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())

    @classmethod
    def of(cls, manifest: Manifest) -> Self:
        """The manifest's record. Raises CorruptArtifact naming the artifact and the field."""
        try:
            return cls.model_validate(manifest.info)
        except ValidationError as error:
            problem = error.errors()[0]
            field = printable(".".join(map(str, ("info", *problem["loc"]))), 200)
            raise CorruptArtifact(
                f"{manifest.artifact}: its manifest's {field} isn't as a {cls.__name__}'s: {problem['msg']};"
                " delete it and run the stage again"
            ) from None

    def as_json(self) -> dict[str, Any]:
        """Fields that a manifest holds."""
        return self.model_dump(mode="json")


class Reason(Info):
    """Why rows were rejected, or what they lost: how many for this reason, and the id of one."""

    id: str
    reason: str
    rows: Count


class RowsInfo(Info):
    """Counts of rows (usable, for training, held out) and of rejected and equal images, and the names of labels.

    `duplicates` are images that are equal to an earlier one; `dropped` of them were left out. `classes`: names by
    folder. `ignored`: files that aren't read, by their ending. `reasons`: the commonest reasons for a rejection.
    `networks`: fingerprints of the embedder, autoencoder and text encoder, if they aren't the run's own. `versions`:
    versions of libraries. `credit`: the source's note on the owner of the images, if it has one. `losses`: what images
    and captions lost that are used all the same.
    """

    rows: Count
    rows_train: Count
    rows_heldout: Count
    rejected: Count
    duplicates: Count
    dropped: Count
    embedding_dim: Count
    source: str
    classes: tuple[str, ...] | None
    ignored: dict[str, Count]
    reasons: tuple[Reason, ...]
    networks: dict[str, str] = {}
    versions: dict[str, str] = {}
    credit: str | None = None
    losses: tuple[Reason, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Fields that a manifest holds. Without credit and losses the bytes are those of older versions."""
        newer = ("credit", "losses")
        return {name: value for name, value in super().as_json().items() if name not in newer or value}


class CentroidsInfo(Info):
    """Numbers of the rows that k-means saw and of its fine centroids."""

    rows_sampled: Count
    num_fine: Count


class ShardInfo(Info):
    """Counts of a cluster's rows, of its training rows by class, and the standard deviation of their data.

    `centroids`: digest of the centroids that made the cluster; None if there were none. `networks`: see RowsInfo.
    """

    cluster: Count
    rows: Count
    rows_train: Count
    rows_heldout: Count
    counts_C: tuple[Count, ...]
    data_std: Finite | None
    centroids: str | None
    networks: dict[str, str] = {}

    def as_json(self) -> dict[str, Any]:
        """Fields that a manifest holds. Without networks the bytes are those of older versions."""
        return {name: value for name, value in super().as_json().items() if name != "networks" or value}

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        if self.rows != self.rows_train + self.rows_heldout or sum(self.counts_C) not in (0, self.rows_train):
            raise ValueError("rows, rows_train, rows_heldout and counts_C don't add up")
        return self


class PartitionInfo(Info):
    """Counts of training rows by class and cluster, and of held-out rows.

    `ari`: adjusted Rand index with the classes; None if it is undefined. `networks`: see RowsInfo.
    """

    counts_CK: tuple[tuple[Count, ...], ...]
    rows_K: tuple[Count, ...]
    rows_heldout_K: tuple[Count, ...]
    ari: Finite | None
    networks: dict[str, str] = {}

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        by_cluster_K = [sum(counts) for counts in zip(*self.counts_CK, strict=True)] if self.counts_CK else []
        if len(self.rows_K) != len(self.rows_heldout_K) or (any(by_cluster_K) and by_cluster_K != list(self.rows_K)):
            raise ValueError("rows_K, rows_heldout_K and counts_CK don't add up")
        return self


class ClusterFit(Info):
    """Training rows that were appended to a cluster: their number, and how many are `far`, None if unknown.

    A row is far if it is farther from the centroid than 99 % of the rows from which the clusters were made.
    """

    rows: Count
    far: Count | None


class ReportInfo(Info):
    """Separation of the clusters, by the embeddings of a sample, and what to look at before training.

    `silhouette` in [-1, 1]; None if undefined. `far_K`: the distance from each centroid
    within which 99 % of a sample's rows lie. `fit`: for each cluster, if rows have been appended.
    """

    silhouette: float | None
    warnings: tuple[str, ...]
    fit: tuple[ClusterFit, ...] = ()
    far_K: tuple[Finite | None, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Fields that a manifest holds."""
        return {name: value for name, value in super().as_json().items() if name not in ("fit", "far_K") or value}

    @classmethod
    def of_either(cls, report: Manifest | None, partition: Manifest | None) -> Self | None:
        """The record of a report; None if there is none. In older versions the partition's manifest holds it."""
        holders = [manifest for manifest in (report, partition) if manifest and "warnings" in manifest.info]
        return cls.of(holders[0]) if holders else None


class HeldoutInfo(Info):
    """Loss of a training job's last weights on held-out rows, and its standard error."""

    step: Count
    loss: Finite
    error: Finite


class TrainedInfo(Info):
    """A finished training job: the folder of its EMA weights, steps, cost, and the mean loss of the last steps.

    `seconds`: time of training, over all `attempts`. `versions`: versions of libraries in the last attempt. `heldout`:
    None if the held-out loss wasn't measured; `unmeasured`: why the last attempt didn't measure it.
    """

    weights: str = Field(pattern=r"^[A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)*$", max_length=200)
    step: Count
    rows_seen: Count
    training_flops: Finite
    training_flops_per_row: Finite
    parameters: Count
    seconds: Finite
    loss: Finite
    attempts: Count
    versions: dict[str, str] = {}
    heldout: HeldoutInfo | None = None
    unmeasured: str = Field(default="", max_length=1000)

    def as_json(self) -> dict[str, Any]:
        """Fields that a manifest holds. Without measurements the bytes are those of older versions."""
        fields = super().as_json().items()
        return {name: value for name, value in fields if name not in ("heldout", "unmeasured") or value}


class BeginningInfo(Info):
    """Weights that a training job begins with: where they were read, and their number of parameters."""

    source: str
    parameters: Count


class EvaluationInfo(Info):
    """Frechet distance by the name of the measured samples, and the strategy with the smallest one."""

    num_samples: Count
    frechet: dict[str, float]
    best_strategy: str


class ReferenceInfo(Info):
    """Number of training rows in a reference, and of features of each row."""

    rows: Count
    features: Count


class StateInfo(Info):
    """A training state: finished steps, seconds that they took, and the world size that wrote it."""

    step: Count
    seconds: Finite
    world_size: Count


class WeightsInfo(Info):
    """Published EMA weights: the finished steps."""

    step: Count
