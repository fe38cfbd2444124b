"""Remedies of errors, as data. Nothing here knows a command or its options: `ddm_ray.cli.fixes` phrases them so."""

from contextlib import suppress
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from typing import Any


@dataclass(frozen=True)
class Make:
    """Make an artifact of the run at a URL, after deleting the file or folder that is in the way, if one is."""

    run: str
    artifact: str
    delete: str = ""

    def __str__(self) -> str:
        return f"delete {self.delete} and make {self.artifact} again" if self.delete else f"make {self.artifact}"


@dataclass(frozen=True)
class Resume:
    """Train an artifact of the run at a URL again, which continues from the state after `step` steps, if above 0."""

    run: str
    artifact: str
    step: int

    def __str__(self) -> str:
        return f"trained again, {self.artifact} {self.effect}"

    @property
    def effect(self) -> str:
        """The verb of a sentence about it."""
        return f"goes on from step {self.step}" if self.step else "begins again"


@dataclass(frozen=True)
class Begin:
    """Begin a run: the one missing at `run`, or another one with a field of its configuration changed."""

    run: str = ""
    field: str = ""
    value: str = ""

    def __str__(self) -> str:
        return f"begin a run with {self.field}={self.value}" if self.field else "begin a run there"


@dataclass(frozen=True)
class Give:
    """Call the same stage again with another `argument`: `advice` is an imperative, `value` what to give, if known."""

    argument: str
    advice: str
    value: str = ""

    def __str__(self) -> str:
        return f"{self.advice} ({self.argument}{'=' if self.value else ''}{self.value})"


@dataclass(frozen=True)
class Allow:
    """Take back the request that nobody trains an artifact of the run at a URL."""

    run: str
    artifact: str

    def __str__(self) -> str:
        return f"take back the request that {self.artifact} stops"


@dataclass(frozen=True)
class Accept:
    """Accept an artifact of the run at a URL, which others have trained."""

    run: str
    artifact: str

    def __str__(self) -> str:
        return f"accept {self.artifact}"


Fix = Make | Resume | Begin | Give | Allow | Accept | str
"""Remedy of an error: data where a command or an option does it, else prose in the imperative."""
_FIXES: dict[str, Any] = {kind.__name__: kind for kind in (Make, Resume, Begin, Give, Allow, Accept)}


def read_fix(fields: Any) -> Fix | None:
    """A remedy of what `DDMError.to_fields` wrote; None for one that can't be read."""
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
