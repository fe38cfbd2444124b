"""Fields of the configuration that belong to an artifact's identity: those that its stage reads."""

from contextlib import suppress
from operator import attrgetter
from typing import Any

from pydantic import BaseModel, ValidationError

from ddm_ray.config import RunConfig
from ddm_ray.run.graph import KINDS, Artifact

PLACEMENT = {
    "data": ("source",),
    "embedder": ("batch_size",),
    "features": ("batch_size",),
    "init_from": ("source", "network"),  # an input, by its content
}
"""Fields, by section, that say where something lies or runs and don't affect the result."""


def fields_of(config: RunConfig, artifact: Artifact) -> dict[str, Any]:
    """The fields of the configuration that an artifact's stage reads and its identity holds, by their last names."""
    everything = config.model_dump(mode="json")
    fields = {path.rpartition(".")[2]: _at(everything, path) for path in KINDS[artifact.kind].reads(config)}
    return _without_placement(fields)


def completed(config: RunConfig, artifact: Artifact, fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of an identity as today's configuration spells them, with defaults for fields that were added since.

    Fields that can't be read any more are left as they are, so that they drift.
    """
    spelled = dict(fields)
    for path in KINDS[artifact.kind].reads(config):
        name, part = path.rpartition(".")[2], attrgetter(path)(config)
        if isinstance(part, BaseModel) and name in fields:
            with suppress(ValidationError):
                spelled[name] = type(part).model_validate(fields[name]).model_dump(mode="json")
    return _without_placement(spelled)


def _without_placement(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields without those in PLACEMENT, also in nested sections."""
    kept = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            section = {each: inner for each, inner in value.items() if each not in PLACEMENT.get(name, ())}
            value = _without_placement(section)
        kept[name] = value
    return kept


def _at(value: Any, path: str) -> Any:
    for name in path.split("."):
        value = value[name]
    return value
