"""Experts that differ from the others of their run: in size, prediction, path or schedule (paper, section 3.4)."""

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from ddm_ray.config.networks import NETWORKS
from ddm_ray.config.strict_model import StrictModel

_SIZE = {"width", "depth", "heads"}


class ExpertChanges(StrictModel):
    """The fields in which one cluster's expert differs from `expert.model`, `flow` and `expert.train`."""

    model: dict[str, Any] = Field(
        default_factory=dict, description="of expert.model, such as size; or another kind of network, whole"
    )
    flow: dict[str, Any] = Field(default_factory=dict, description="of flow, such as prediction or path")
    train: dict[str, Any] = Field(default_factory=dict, description="of expert.train, such as batch or init_from")

    def change(self, part: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a part (model, flow or train) with the changes."""
        changes: dict[str, Any] = getattr(self, part)
        return _network(fields, changes) if part == "model" else {**fields, **changes}


def _network(fields: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a network with changes. Those of another kind of network aren't mixed with its own."""
    if not changes:
        return dict(fields)
    first, *others = NETWORKS.values()
    # A name that no network has is a mistyped one of this network.
    of_another = any(changes.keys() <= each.model_fields.keys() for each in others)
    is_of_first = changes.keys() - {"size"} <= first.model_fields.keys()
    if (of_another and not is_of_first) or not fields.keys() <= first.model_fields.keys():
        return dict(changes)
    size = str(changes.get("size", ""))
    named = (_SIZE if size else set()) | ({"patch_size"} if "/" in size else set())  # DiT-XL/2 names its patches, too
    return {**{name: value for name, value in fields.items() if name not in named}, **changes}
