"""One exchange between the ranks a step: their mean loss, and flags by which all of them decide alike."""

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
    hopeless: bool = False  # states were refused for good too often in a row
    overtaken: bool = False  # a newer attempt has taken this one's place
    due: bool = False  # its clock says that a state is to be saved


def exchange(loss: Tensor, flags: Flags) -> tuple[float, Flags]:
    """The mean of a scalar loss over all ranks, in float64, and the flags that any rank raised.

    Every rank must call it. It is one all-reduce on the loss' device, and none in a world of one.
    """
    loss_and_flags = torch.tensor([0.0, *astuple(flags)], dtype=torch.float64, device=loss.device)
    loss_and_flags[0] = loss.detach()
    if (world_size := dist.get_world_size()) > 1:
        dist.all_reduce(loss_and_flags)
    total, *raised = loss_and_flags.tolist()
    return total / world_size, Flags(*(count > 0 for count in raised))
