"""What can go wrong in a way that a user can mend. Every message is one line: what, where, what to do."""


class DDMError(Exception):
    """Base of all errors that the command line prints as one line, without a traceback."""


class ConfigError(DDMError):
    """A run configuration or placement with an unknown key, a wrong type or a value out of range."""


class RunError(DDMError):
    """A folder or URI that isn't a run, or a run made by an incompatible version."""


class StorageError(DDMError):
    """Storage that refuses: no permission, no space, no network."""


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


class TooManyRows(TrainingError):
    """A micro-batch doesn't fit into memory."""


class RayError(DDMError):
    """There is no Ray cluster to join, or it has not what a job asks of it."""


class ServeError(DDMError):
    """Serving can't start: a port in use, an unfinished run."""
