"""Remedies of errors, as data. Commands and options are unknown here; `ddm_ray.cli.fixes` turns remedies into them."""

from contextlib import suppress
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from typing import Any


@dataclass(frozen=True)
class Make:
    """Make an artifact of the run at a URL; first delete the file or folder that is in the way, if there is one.

    `first`: it isn't the artifact that is missing, but the first of those that this one needs. `with_others`: other
    models are missing, too, so that one command should train all.
    """

    run: str
    artifact: str
    delete: str = ""
    first: bool = False
    with_others: bool = False

    def __str__(self) -> str:
        if self.first or self.with_others:
            others = " and the other models" if self.with_others else ""
            return f"{'first ' if self.first else ''}make {self.artifact}{others}"
        return f"delete {self.delete} and make {self.artifact} again" if self.delete else f"make {self.artifact}"


@dataclass(frozen=True)
class Mend:
    """Mend a damaged artifact of the run at a URL: an examination of the run knows how that is done without a loss."""

    run: str
    artifact: str

    def __str__(self) -> str:
        return f"mend {self.artifact}, as an examination of the run advises"


@dataclass(frozen=True)
class Resume:
    """Train an artifact of the run at a URL again, from its state after `step` steps if that is above 0.

    `on_island`: whether it was trained on an island, any of which can do it.
    """

    run: str
    artifact: str
    step: int
    on_island: bool = False

    def __str__(self) -> str:
        return f"trained again, {self.artifact} {self.effect}"

    @property
    def effect(self) -> str:
        """The predicate of a sentence about the artifact."""
        return f"goes on from step {self.step}" if self.step else "starts from step 0"


@dataclass(frozen=True)
class Begin:
    """Begin the run that is missing at `run`, or another run with a field of the configuration changed."""

    run: str = ""
    field: str = ""
    value: str = ""

    def __str__(self) -> str:
        return f"begin a run with {self.field}={self.value}" if self.field else "begin a run there"


@dataclass(frozen=True)
class Give:
    """Call the stage again with another `argument`. `advice` is an imperative; `value` is what to pass, if known."""

    argument: str
    advice: str
    value: str = ""

    def __str__(self) -> str:
        return f"{self.advice} ({self.argument}{'=' if self.value else ''}{self.value})"


@dataclass(frozen=True)
class Allow:
    """Take back the stop request of an artifact of the run at a URL."""

    run: str
    artifact: str

    def __str__(self) -> str:
        return f"take back the request that {self.artifact} stops"


@dataclass(frozen=True)
class Accept:
    """Accept an artifact that others have trained for the run at a URL."""

    run: str
    artifact: str

    def __str__(self) -> str:
        return f"accept {self.artifact}"


Fix = Make | Mend | Resume | Begin | Give | Allow | Accept | str
"""Remedy of an error: data if a command or an option does it, otherwise prose in the imperative."""
_FIXES: dict[str, Any] = {kind.__name__: kind for kind in (Make, Mend, Resume, Begin, Give, Allow, Accept)}


def read_fix(fields: Any) -> Fix | None:
    """The remedy that `DDMError.to_fields` wrote; None if it can't be read."""
    if isinstance(fields, str):
        return fields
    kind = _FIXES.get(str(fields.get("do"))) if isinstance(fields, dict) else None
    if kind is None:
        return None
    arguments = {name: value for name, value in fields.items() if name != "do"}
    types: dict[str, Any] = {each.name: each.type for each in dataclass_fields(kind)}
    if not all(isinstance(value, types.get(name, object)) for name, value in arguments.items()):
        return None
    with suppress(TypeError):  # a field too many, or too few
        fix: Fix = kind(**arguments)
        return fix
    return None
