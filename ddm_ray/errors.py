"""Errors that a user can mend: a line that says what happened and where, and the remedy as data."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from ddm_ray.remedies import Fix, read_fix
from ddm_ray.spelling import spelled_out


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
        error = known(str(fields["error"]), read_fix(fields.get("fix")))
        if isinstance(passes := fields.get("passes"), bool):
            error.passes = passes
        return error


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


class RayAway(RayError):
    """There is no Ray cluster at the address, it was lost meanwhile, or the nodes of a slice aren't back."""

    KIND_PASSES = True


class ServeError(DDMError):
    """Serving can't start: a port in use, an unfinished run."""
