"""One exchange between the ranks a step: the mean loss, and flags by which all ranks decide alike."""

import math
from dataclasses import astuple, dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Flags:
    """Facts about one rank, or about any rank of the world once they are exchanged."""

    leaving: bool = False  # asked to save a state and end
    writing: bool = False  # its part of a state is still being written
    saving: bool = False  # a state is still being written or committed
    refused: bool = False  # storage refused its part of a state
    unsavable: bool = False  # states were refused for good too often in a row
    superseded: bool = False  # a newer attempt has taken this one's place
    checkpoint_due: bool = False  # its clock says that a state is to be saved

    def __or__(self, other: "Flags") -> "Flags":
        return Flags(*(mine or others for mine, others in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class StepResult:
    """A step's mean loss over all ranks, and the norm of its gradient."""

    step: int
    loss: float
    norm: float

    @property
    def finite(self) -> bool:
        """False if training can't go on."""
        return math.isfinite(self.loss) and math.isfinite(self.norm)


@dataclass(frozen=True)
class Agreed:
    """Common knowledge of all ranks after a step: results of steps that are new, and flags that any rank raised."""

    results: tuple[StepResult, ...]
    any_rank: Flags


class StepSync:
    """Exchanges results of steps as they become known.

    On a GPU the result of a step is known once the next step is given to the device, so that it never runs dry.
    """

    def __init__(self) -> None:
        self._under_way: _Reading | None = None

    def exchange(self, step: int, loss: Tensor, norm: Tensor, flags: Flags) -> Agreed:
        """Results that weren't known before this step was under way, and the flags that any rank raises.

        `loss` (this rank's part) and `norm` are scalars on the device. Every rank must call it.
        """
        before, reading = self._under_way, _Reading(step, loss, norm)
        self._under_way = reading if reading.copied else None
        return self._known(before if reading.copied else reading, flags)

    def finish(self, agreed: Agreed) -> Agreed:
        """Wait for the results that aren't known yet, and add them. Every rank must call it."""
        before, self._under_way = self._under_way, None
        if before is None:
            return agreed
        return Agreed(agreed.results + self._known(before, Flags()).results, agreed.any_rank)

    def _known(self, reading: "_Reading | None", flags: Flags) -> Agreed:
        loss, norm = reading.values() if reading else (0.0, 0.0)
        mean, any_rank = reduce_flags(loss, flags)
        return Agreed((StepResult(reading.step, mean, norm),) if reading else (), any_rank)


class _Reading:
    """Loss and norm of a step on their way from the device, in memory that the host can read once `copied` says so."""

    def __init__(self, step: int, loss: Tensor, norm: Tensor):
        self.step, self._values = step, torch.stack([loss.detach().double(), norm.to(loss.device)])
        self.copied: torch.cuda.Event | None = None
        if loss.device.type != "cpu":
            self._values = torch.empty(2, dtype=torch.float64).pin_memory().copy_(self._values, non_blocking=True)
            self.copied = torch.cuda.Event(blocking=True)  # a spinning wait would take the other threads' processor
            self.copied.record(torch.cuda.current_stream(loss.device))

    def values(self) -> tuple[float, float]:
        """Both, once they have come."""
        if self.copied:
            self.copied.synchronize()
        loss, norm = self._values.tolist()
        return loss, norm


def reduce_flags(loss: float, flags: Flags) -> tuple[float, Flags]:
    """The mean of a loss over all ranks, in float64, and the flags that any rank raised.

    Every rank must call it. It is one all-reduce between CPUs, and none in a world of one.
    """
    if (world_size := dist.get_world_size()) == 1:
        return loss, flags
    loss_and_flags = torch.tensor([loss, *astuple(flags)], dtype=torch.float64, device="cpu")
    dist.all_reduce(loss_and_flags)
    total, *raised = loss_and_flags.tolist()
    return total / world_size, Flags(*(count > 0 for count in raised))
