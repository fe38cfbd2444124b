"""Progress of a training job, as a state keeps it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TrainProgress:
    """Progress of a job: finished steps, seconds trained, each step's loss and gradient norm (rank 0's alone)."""

    step: int
    seconds: float
    curve: Mapping[str, Sequence[float]]
