"""The base class of every piece of configuration."""

from os.path import expanduser
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

FolderName = Annotated[str, AfterValidator(expanduser)]
"""A folder or file, in which `~` is the home of the user who begins the run; or a name of the hub."""


class StrictModel(BaseModel):
    """A frozen piece of configuration that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)
