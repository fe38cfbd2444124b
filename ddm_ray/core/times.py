"""Times: how training draws them, and the grids that solvers step through. Shapes: B rows."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ddm_ray.core.flow import PATHS
from ddm_ray.core.names import TimeDistribution, parse_time_grid


@dataclass(frozen=True)
class TimeSampling:
    """The distribution of t in training: uniform, sigmoid of N(mean, std^2), or one of n / num_times, n = 1..num_times.

    `shift` > 0 then lowers the log-SNR by 2 log(shift). Sigmoid and shift are Esser et al.'s (2024, arXiv 2403.03206),
    with a shift of sqrt(pixels / pixels before).
    """

    kind: TimeDistribution = "uniform"
    mean: float = 0.0
    std: float = 1.0
    num_times: int = 1000
    shift: float = 1.0

    def times(self, uniform_B: np.ndarray, path: str = "linear") -> Tensor:
        """t_B float32 in [0, 1], the quantiles at `uniform_B` in [0, 1), shifted on `path`."""
        t_B = torch.from_numpy(uniform_B).double()
        if self.kind == "logit-normal":
            t_B = torch.sigmoid(self.mean + self.std * torch.special.ndtri(t_B))
        elif self.kind == "discrete":
            t_B = ((t_B * self.num_times).floor() + 1) / self.num_times
        return shifted(t_B, self.shift, path).float()


def shifted(t_B: Tensor, shift: float, path: str = "linear") -> Tensor:
    """The times on `path` with the log-SNR of `t_B` less 2 log(shift); 0 and 1 stay, on linear and cosine.

    On the linear path s t / (1 + (s-1) t). What would lie beyond ddpm's end is at that end, t = 1.
    """
    if shift == 1:
        return t_B
    if path == "linear":
        # In this form 1 stays 1 exactly.
        return shift * t_B / (shift * t_B + (1 - t_B))
    return PATHS[path].time_of(PATHS[path].log_snr(t_B) - 2 * math.log(shift))


def time_grid(name: str, steps: int) -> Tensor:
    """`steps` + 1 times of the linear path from exactly 1 to exactly 0, float64; `steps` is 1 or more.

    `uniform`: equally spaced; `cosine`: with the SNRs of equal steps on the cosine path (dense in the middle);
    `shifted-S`: uniform, then shifted by S > 0 (S > 1: dense near noise). ValueError for others.
    """
    kind, shift = parse_time_grid(name)
    uniform = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    if kind == "cosine":
        return PATHS["linear"].time_of(PATHS["cosine"].log_snr(uniform))
    return shifted(uniform, shift)
