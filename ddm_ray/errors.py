"""Errors that a user can mend: one line on what happened and where, and the remedy as data."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from ddm_ray.remedies import Fix, read_fix
from ddm_ray.spelling import escape_unprintable


class DDMError(Exception):
    """Base of all errors that the command line prints as one line, without a traceback.

    `message` says what happened and where. `fix` says what mends it; a message may also contain its remedy as prose.
    `passes` is true if a later try may succeed without a repair. Its default is the class's `KIND_PASSES`.
    """

    KIND_PASSES = False

    def __init__(self, message: str, fix: Fix | None = None):
        super().__init__(message)  # unpickling passes the message only and restores the other attributes itself
        self.message, self.fix, self.passes = message, fix, self.KIND_PASSES

    def __str__(self) -> str:
        return self.text()

    def text(self, phrase: Callable[[Fix], str] = str) -> str:
        """Message and fix as one printable line; `phrase` puts the fix into words."""
        return escape_unprintable(self.message if self.fix is None else f"{self.message}; {phrase(self.fix)}")

    def to_fields(self) -> dict[str, Any]:
        """The error as JSON, to pass it between processes."""
        fix: Any = self.fix
        if fix is not None and not isinstance(fix, str):
            fix = {"do": type(fix).__name__, **asdict(fix)}
        return {"kind": type(self).__name__, "error": self.message, "fix": fix, "passes": self.passes}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> "DDMError":
        """The error that `to_fields` wrote. An unknown kind becomes this class; an unreadable fix is left out."""
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
    """Storage refuses: no permission, no space, no network.

    It passes unless a person must mend a key or free space.
    """

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


class DataError(DDMError):
    """A data set that can't be read, or is too small for what is asked of it."""


class SamplingError(DDMError):
    """A request for images has an invalid strategy, solver, steps, label or guidance."""


class ExpertCountError(SamplingError):
    """Router, prior and experts disagree about the number of experts."""


class NotFiniteError(SamplingError):
    """The output of an expert or the router contains NaN or infinity."""


class TrainingError(DDMError):
    """A training job stopped for a reason that another attempt won't mend."""


class Preempted(TrainingError):
    """A training worker's machine will be preempted, or its group will grow; the state is saved."""

    KIND_PASSES = True


class Overtaken(TrainingError):
    """A newer attempt went further than this one, and has ended; the next one goes on from its state."""

    KIND_PASSES = True


class GaveUp(TrainingError):
    """A launch lost its workers, or the process that starts them, too often in a row. A later launch may succeed."""

    KIND_PASSES = True


class Superseded(TrainingError):
    """A newer attempt has taken the place of an attempt, which ends, and its launch too.

    `by_its_own_launch`: the newer attempt belongs to the same launch, which goes on with it. The error doesn't pass:
    a launch that tried again would take the job back, and two such launches would do so for ever.
    """

    by_its_own_launch = False


class Stopped(TrainingError):
    """A launch ends because of a stop request on storage; its state is saved.

    It doesn't pass: the artifact is not to be trained at all.
    """


class Left(Stopped):
    """A launch leaves its artifact to others; its state is saved. Its island is drained, or a worker has taken over."""

    KIND_PASSES = True


class InTraining(TrainingError):
    """Another launch trains the artifact now."""

    KIND_PASSES = True


class OutOfMemory(TrainingError):
    """A micro-batch doesn't fit into memory."""


class RayError(DDMError):
    """A Ray cluster lacks resources that a job needs, or requires another token."""


class RayAway(RayError):
    """There is no Ray cluster at the address, it was lost, or the nodes of a slice aren't back yet."""

    KIND_PASSES = True


class ServeError(DDMError):
    """Serving can't start: a port in use, an unfinished run."""
