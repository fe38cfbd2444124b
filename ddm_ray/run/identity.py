"""Fields of the configuration that belong to an artifact's identity: those that its stage reads."""

from contextlib import suppress
from typing import Any

from pydantic import BaseModel, TypeAdapter

from ddm_ray.config import RunConfig
from ddm_ray.config.older import own_batch
from ddm_ray.run.graph import KINDS, Artifact

PLACEMENT = {
    "data": ("source",),
    "embedder": ("batch_size",),
    "features": ("batch_size",),
    "init_from": ("source", "network"),  # an input, by its content
}
"""Fields, by section, that say where something lies or runs and don't affect the result."""
_NUM_CLUSTERS = "num_clusters"
"""A field that identities of trained artifacts had in older versions, when experts shared a batch."""


def fields_of(config: RunConfig, artifact: Artifact) -> dict[str, Any]:
    """The fields of the configuration that an artifact's stage reads and its identity holds, by their last names."""
    return _without_placement(
        {name: _plain(part) for name, part in KINDS[artifact.kind].reads(config, artifact.cluster).items()}
    )


def is_longer(before: RunConfig, after: RunConfig, artifact: Artifact) -> bool:
    """True if two configurations differ for a training job in its number of steps alone, if at all."""
    part = KINDS[artifact.kind].part
    if part is None or artifact.cluster in after.changes.retrained:
        return False
    both = [fields_of(config, artifact) for config in (before, after)]
    for fields in both:
        for name in ("expert", part):
            if isinstance(train := fields.get(name, {}).get("train"), dict):
                fields[name] = {**fields[name], "train": {**train, "steps": 0}}
    return both[0] == both[1]


def completed(config: RunConfig, artifact: Artifact, fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of an identity as today's configuration spells them, with defaults for fields that were added since.

    Fields that can't be read any more are left as they are, so that they drift.
    """
    reads = KINDS[artifact.kind].reads(config, artifact.cluster)
    spelled = {name: value for name, value in fields.items() if name != _NUM_CLUSTERS or name in reads}
    sharing = fields.get(_NUM_CLUSTERS) if artifact.cluster is not None else 1
    for name, part in reads.items():
        if isinstance(part, BaseModel) and name in fields:
            with suppress(ValueError):  # ValidationError is one, too
                older = _with_a_source(own_batch(fields[name], sharing, name))
                spelled[name] = type(part).model_validate(older).model_dump(mode="json")
    return _without_placement(spelled)


def _with_a_source(job: Any) -> Any:
    """The fields of a job with a source of the weights that it begins with, which an identity leaves out."""
    train = job.get("train") if isinstance(job, dict) else None
    if not isinstance(train, dict) or train.get("init_from") != {}:
        return job
    return {**job, "train": {**train, "init_from": {"source": "left out"}}}


def _without_placement(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields without those in PLACEMENT, also in nested sections."""
    kept = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            section = {each: inner for each, inner in value.items() if each not in PLACEMENT.get(name, ())}
            value = _without_placement(section)
        kept[name] = value
    return kept


def _plain(part: Any) -> Any:
    return (
        part.model_dump(mode="json") if isinstance(part, BaseModel) else TypeAdapter(Any).dump_python(part, mode="json")
    )
