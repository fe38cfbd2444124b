"""Errors that a user can mend: a line that says what happened and where, and the remedy as data.

Nothing here knows a command or its options: `ddm_ray.cli.fixes` phrases a remedy as these.
"""

import errno
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
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


class Extend(Begin):
    """Train the run at a URL for more steps, which `field` and `value` say."""

    def __str__(self) -> str:
        return f"extend it to {self.field}={self.value}"


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


Fix = Make | Resume | Extend | Begin | Give | Allow | Accept | str
"""Remedy of an error: data where a command or an option does it, else prose in the imperative."""
_FIXES: dict[str, Any] = {kind.__name__: kind for kind in (Make, Resume, Extend, Begin, Give, Allow, Accept)}


class DDMError(Exception):
    """Base of all errors that the command line prints as one line, without a traceback.

    `message` says what happened and where, `fix` what mends it, which the message may say itself where it is prose.
    `passes` is true if it may be over when the same is tried again later, with nothing mended: `KIND_PASSES` of most.
    """

    KIND_PASSES = False

    def __init__(self, message: str, fix: Fix | None = None):
        super().__init__(message)  # all that unpickling calls this with; the rest comes with the attributes
        self.message, self.fix, self.passes = message, fix, self.KIND_PASSES

    def __str__(self) -> str:
        return self.text()

    def text(self, phrase: Callable[[Fix], str] = str) -> str:
        """Message and fix as one line, which others may have written; `phrase` puts the fix into words."""
        return spelled_out(self.message if self.fix is None else f"{self.message}; {phrase(self.fix)}")

    def to_fields(self) -> dict[str, Any]:
        """The error as JSON, for a border that no exception crosses."""
        fix: Any = self.fix
        if fix is not None and not isinstance(fix, str):
            fix = {"do": type(fix).__name__, **asdict(fix)}
        return {"kind": type(self).__name__, "error": self.message, "fix": fix, "passes": self.passes}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> "DDMError":
        """Read what `to_fields` wrote: an error of its kind, else of this one. A fix that can't be read is left out."""
        kind = globals().get(str(fields.get("kind")))
        known = kind if isinstance(kind, type) and issubclass(kind, DDMError) else cls
        error = known(str(fields["error"]), _read_fix(fields.get("fix")))
        if isinstance(passes := fields.get("passes"), bool):
            error.passes = passes
        return error


def _read_fix(fields: Any) -> Fix | None:
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


class ConfigError(DDMError):
    """A run configuration or placement with an unknown key, a wrong type or a value out of range."""


class RunError(DDMError):
    """A folder or URI that isn't a run, or a run made by an incompatible version."""


class StorageError(DDMError):
    """Storage that refuses: no permission, no space, no network. It passes if nobody has to mend a key or make room."""

    KIND_PASSES = True

    def __init__(self, message: str, fix: Fix | None = None, passes: bool = True):
        super().__init__(message, fix)
        self.passes = passes


class MissingArtifact(DDMError):
    """A stage needs an artifact that no earlier stage has committed."""


class DriftError(DDMError):
    """An artifact was made under another configuration or from other inputs than the run's."""


class CorruptArtifact(DDMError):
    """A file that is truncated, altered or not of the form its manifest promises."""


class TruncatedWeights(CorruptArtifact):
    """A file of weights that ends early or isn't one."""


class ArchiveError(DDMError):
    """An archive that isn't byte by byte as packing writes it, or that doesn't fit into the run."""


class DataError(DDMError):
    """A data set that can't be read, or is too small for what is asked of it."""


class SamplingError(DDMError):
    """A request for images that can't be met: strategy, solver, steps, labels, guidance."""


class ExpertCountError(SamplingError):
    """Router, prior and experts that don't speak of the same number of experts."""


class TimeError(SamplingError):
    """A time outside [0, 1], where 0 is data and 1 is noise."""


class NotFiniteError(SamplingError):
    """An expert or the router answered NaN or infinity."""


class NullConditionError(SamplingError):
    """Guidance, or an unconditional image, asked of models that were trained without a null condition."""


class TrainingError(DDMError):
    """A training job that stopped for a reason that trying again won't mend."""


class Preempted(TrainingError):
    """A training worker's machine is about to be taken away, or its group to grow; the state is saved."""

    KIND_PASSES = True


class GaveUp(TrainingError):
    """A launch that lost its workers, or whatever started them, too often in a row; nobody knows if it is hopeless."""

    KIND_PASSES = True


class Superseded(TrainingError):
    """An attempt, and with it its launch, whose place a newer attempt has taken.

    `by_its_own_launch`: that is one of the same launch, which goes on with it. It doesn't pass: whoever tried again
    would take the job back, and two that are started again and again would do so for ever.
    """

    by_its_own_launch = False


class Stopped(TrainingError):
    """A launch that ends because somebody asked for it on storage; what it had trained is saved.

    It passes where the launch alone was asked to end, and not where nobody is to train the artifact.
    """


class OutOfMemory(TrainingError):
    """A micro-batch doesn't fit into memory."""


class RayError(DDMError):
    """A Ray cluster that has not what a job asks of it, or asks for another token."""


class WrongToken(RayError):
    """A Ray cluster that asks for another token, or a file that has none for it."""


class RayAway(RayError):
    """There is no Ray cluster at the address, it was lost meanwhile, or the nodes of a slice aren't back."""

    KIND_PASSES = True


class ServeError(DDMError):
    """Serving can't start: a port in use, an unfinished run."""


# A cloud's machines are asked there for a key by who was given none.
_KEY_SERVICE = re.compile(r"http://(169\.254\.169\.254|metadata\.google\.internal)")
# What only a person changes. Of errors of obstore the text alone has the number.
_FULL = (errno.ENOSPC, errno.EDQUOT)
_LASTING = (*_FULL, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP, errno.ENOTDIR, errno.ENAMETOOLONG)
_NUMBER = re.compile(r"\(os error (\d+)\)")


def one_line(what: object, limit: int | None = None, *, tail: bool = False) -> str:
    """A text or an error's text as one line of at most `limit` characters, the last ones with `tail`.

    An error that says nothing is named by its class.
    """
    text = " ".join(str(what).split()) or (type(what).__name__ if isinstance(what, BaseException) else "")
    return text if limit is None else text[-limit:] if tail else text[:limit]


@contextmanager
def as_storage_error(
    where: object,
    fix: Fix | None = None,
    kinds: tuple[type[BaseException], ...] = (OSError,),
    missing: type[DDMError] = StorageError,
) -> Iterator[None]:
    """Turn refusals of storage, exceptions of these `kinds`, into a StorageError of one line that begins with `where`.

    `missing`: the error in place of a FileNotFoundError.
    """
    try:
        yield
    except kinds as error:
        kind = missing if isinstance(error, FileNotFoundError) else StorageError
        room = "free some space there" if _number(error) in _FULL else None
        refused = kind(f"{where}: {refusal(error, where)}", fix or room)
        refused.passes &= may_pass(error)
        raise refused from None


def may_pass(error: BaseException) -> bool:
    """False for a refusal of a local disk that somebody must mend (no space, no right), or for want of a key."""
    return _number(error) not in _LASTING and not _KEY_SERVICE.search(str(error))


def _number(error: BaseException) -> int | None:
    """The system's number of an error; None if it has none."""
    if isinstance(error, OSError) and error.errno:
        return error.errno
    return int(match[1]) if (match := _NUMBER.search(str(error))) else None


def refusal(error: BaseException, where: object = None) -> str:
    """Why storage refused, as one printable line: the system's reason and the file, if it isn't the one at `where`.

    Of an error without a number, as libraries raise them, the first paragraph of its text.
    """
    if isinstance(error, OSError) and error.errno:
        name = error.filename
        text = os.strerror(error.errno) + (f": {name}" if name is not None and str(name) != str(where) else "")
    else:
        text = str(error).split("\n\n")[0] or type(error).__name__
        if service := _KEY_SERVICE.search(text):
            keys = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or what your storage calls them"
            text = f"no key: {keys}, where this command and Ray are started (asked in vain: {service[0]})"
    return printable(text, 500)


def printable(what: object, limit: int) -> str:
    """A text of others as one line of at most `limit` characters, which tells a terminal nothing but letters."""
    return spelled_out(one_line(what, limit))[:limit]


def spelled_out(text: str) -> str:
    """A text of others, which tells a terminal nothing but letters and blanks: what does more is shown by its code.

    That is what Unicode doesn't call printable: controls of C0 and C1, ends of lines, and what turns text around.
    """
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
