"""Numbers of the host on the networks' device, which nothing waits for, and the networks' own precision there."""

import numpy as np
import torch
from torch import Tensor


def frozen_dtype(device: torch.device | str) -> torch.dtype:
    """The precision in which networks compute that aren't trained: bf16 on a GPU that has it, else fp32."""
    place = torch.device(device)
    slow = place.type == "cuda" and torch.cuda.get_device_capability(place) < (8, 0)  # T4, V100: it is emulated
    return torch.float32 if place.type == "cpu" or slow else torch.bfloat16


def upload(array: np.ndarray, device: torch.device | str) -> Tensor:
    """A tensor of these numbers on the device; on a CPU it shares their memory."""
    return sent(torch.from_numpy(array), device)


def sent(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A tensor of the host on the device; on a CPU itself."""
    if torch.device(device).type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def each(values: np.ndarray, like: Tensor) -> float | Tensor:
    """One number where all are equal, else a tensor (B,) with the precision and device of `like`."""
    if len(values) == 1 or (values == values[0]).all():
        return float(values[0])
    return upload(values.astype(np.float64 if like.dtype == torch.float64 else np.float32), like.device)


def spread(values: np.ndarray, count: int) -> np.ndarray:
    """One value a row, where there may be one for all rows."""
    # numpy's own broadcasting takes 8 microseconds, several times a velocity.
    return values if len(values) == count else np.full(count, values[0])


def picked(tensor: Tensor, rows: np.ndarray) -> Tensor:
    """Some rows, by number in ascending order; the tensor itself if these are all."""
    return tensor if len(rows) == len(tensor) else tensor[upload(rows, tensor.device)]
