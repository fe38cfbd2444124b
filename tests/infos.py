"""Records of manifests, valid for their kind of artifact, with the fields that a test cares about."""

from typing import Any

from ddm_ray.run.graph import Artifact
from ddm_ray.run.info import Info
from ddm_ray.run.manifest import FileRecord, Manifest
from ddm_ray.run.run import Run

DEFAULTS: dict[str, dict[str, Any]] = {
    "RowsInfo": {
        "rows": 3,
        "rows_train": 3,
        "rows_heldout": 0,
        "rejected": 0,
        "duplicates": 0,
        "dropped": 0,
        "embedding_dim": 2,
        "source": "digits",
        "classes": None,
        "ignored": {},
        "reasons": (),
    },
    "ShardInfo": {
        "cluster": 0,
        "rows": 3,
        "rows_train": 3,
        "rows_heldout": 0,
        "counts_C": (),
        "data_std": 0.5,
        "centroids": None,
    },
    "PartitionInfo": {
        "counts_CK": (),
        "rows_K": (2, 1),
        "rows_heldout_K": (0, 0),
        "ari": None,
    },
    "ReportInfo": {"silhouette": None, "warnings": ()},
    "TrainedInfo": {
        "weights": "attempts/0001/weights/step-000000003",
        "step": 3,
        "rows_seen": 24,
        "training_flops": 1e9,
        "training_flops_per_row": 1e8,
        "parameters": 7,
        "seconds": 1.5,
        "loss": 0.25,
        "attempts": 1,
    },
    "BeginningInfo": {"source": "runs/other monolith", "parameters": 3},
    "EvaluationInfo": {"num_samples": 3, "frechet": {"once": 1.0}, "best_strategy": "once"},
}


def info_of(artifact: Artifact, **fields: Any) -> Info:
    """The record of an artifact of this kind; one of counts alone needs no entry in DEFAULTS."""
    return artifact.info(
        **{**DEFAULTS.get(artifact.info.__name__, dict.fromkeys(artifact.info.model_fields, 3)), **fields}
    )


def commit_written(run: Run, artifact: Artifact, names: list[str], info: Info) -> Manifest:
    """Commit the files `names`, which lie below the artifact already, as they are."""
    records = {name: FileRecord.of(run.store.read(f"{artifact}/{name}")) for name in sorted(names)}
    return run.commit_records(artifact, records, info)
