"""Which times are trained on, and which a solver steps through. Shapes: B rows."""

import math
import re
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ddm_ray.core.flow import PATHS
from ddm_ray.errors import ConfigError, SamplingError

KINDS = ("uniform", "logit-normal", "discrete")


@dataclass(frozen=True)
class TimeSampling:
    """How training draws t: uniform, sigmoid of N(mean, std^2) (SD3), or one of n / num_times, n = 1..num_times.

    `shift` > 0 then lowers the log-SNR by 2 log(shift), as much as sqrt(pixels / pixels before) asks for (SD3).
    ConfigError for a kind not known or a number out of range.
    """

    kind: str = "uniform"
    mean: float = 0.0
    std: float = 1.0
    num_times: int = 1000
    shift: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"unknown times {self.kind!r}: use one of {', '.join(KINDS)}")
        if not math.isfinite(self.mean):
            raise ConfigError(f"mean of the times is {self.mean}: use a finite number")
        for name, value in (("std", self.std), ("num_times", self.num_times), ("shift", self.shift)):
            if not 0 < value < math.inf:
                raise ConfigError(f"{name} of the times is {value}: use a finite number above 0")

    def times(self, uniform_B: np.ndarray, path: str = "linear") -> Tensor:
        """t_B float32 in [0, 1], the quantiles at `uniform_B` in [0, 1), shifted on `path`."""
        t_B = torch.from_numpy(uniform_B).double()
        if self.kind == "logit-normal":
            t_B = torch.sigmoid(self.mean + self.std * torch.special.ndtri(t_B))
        elif self.kind == "discrete":
            t_B = ((t_B * self.num_times).floor() + 1) / self.num_times
        return shifted(t_B, self.shift, path).float()


def shifted(t_B: Tensor, shift: float, path: str = "linear") -> Tensor:
    """The times on `path` whose log-SNR is that of `t_B` less 2 log(shift); 0 and 1 stay, on linear and cosine.

    On the linear path s t / (1 + (s-1) t). What would lie beyond ddpm's end is at that end, t = 1.
    """
    if shift == 1:
        return t_B
    if path == "linear":
        # In this form 1 stays 1 exactly.
        return shift * t_B / (shift * t_B + (1 - t_B))
    return PATHS[path].time_of(PATHS[path].log_snr(t_B) - 2 * math.log(shift))


def time_grid(name: str, steps: int) -> Tensor:
    """`steps` + 1 times of the linear path from exactly 1 to exactly 0, float64.

    `uniform`: equally spaced; `cosine`: with the SNRs of equal steps on the cosine path (dense in the middle);
    `shifted-S`: uniform, then shifted by S > 0 (S > 1: dense near noise). SamplingError for others, or steps < 1.
    """
    if steps < 1:
        raise SamplingError(f"steps is {steps}: use 1 or more")
    uniform = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    if name == "uniform":
        return uniform
    if name == "cosine":
        return PATHS["linear"].time_of(PATHS["cosine"].log_snr(uniform))
    shift = re.fullmatch(r"shifted-([0-9]+(?:\.[0-9]+)?)", name)
    if shift and 0 < float(shift[1]) < math.inf:
        return shifted(uniform, float(shift[1]))
    raise SamplingError(f"unknown times {name!r}: use uniform, cosine or shifted-S with a number S above 0")
