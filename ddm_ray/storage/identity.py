"""Fields of the configuration that an artifact's identity holds, as its kind reads them."""

from contextlib import suppress
from operator import attrgetter
from typing import Any

from pydantic import BaseModel, ValidationError

from ddm_ray.config import RunConfig
from ddm_ray.storage.graph import KINDS, Artifact


def fields_of(config: RunConfig, artifact: Artifact) -> dict[str, Any]:
    """The fields of the configuration that an artifact's stage reads: what its identity holds, by their last names."""
    everything = config.model_dump(mode="json")
    return {path.rpartition(".")[2]: _at(everything, path) for path in KINDS[artifact.kind].reads(config)}


def completed(config: RunConfig, artifact: Artifact, fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of an identity as today's configuration spells them, what has been added since at its default.

    Fields that it can't read any more are left as they are, so that they drift.
    """
    spelled = dict(fields)
    for path in KINDS[artifact.kind].reads(config):
        name, part = path.rpartition(".")[2], attrgetter(path)(config)
        if isinstance(part, BaseModel) and name in fields:
            with suppress(ValidationError):
                spelled[name] = type(part).model_validate(fields[name]).model_dump(mode="json")
    return spelled


def _at(value: Any, path: str) -> Any:
    for name in path.split("."):
        value = value[name]
    return value
