"""The base class of every piece of configuration."""

from pydantic import BaseModel, ConfigDict


class StrictModel(BaseModel):
    """A frozen piece of configuration that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)
