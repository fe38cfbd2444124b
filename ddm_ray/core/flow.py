"""Paths between data and noise, what a network may predict on them, and how one prediction becomes another.

A path is x_t = alpha(t) data + sigma(t) noise, t in [0, 1]: 0 is data, 1 is noise. Shapes: B batch, ... any
further dimensions.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache
from typing import get_args

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ddm_ray.core.names import PredictionName
from ddm_ray.errors import ConfigError

MAX_LOG_SNR = 2 * math.log(1000)
"""Largest |log SNR| of a conversion that divides by alpha or sigma: beyond, these are taken from here."""


class Path(ABC):
    """alpha falls from 1, sigma rises from 0; all methods take any shape and keep its dtype and device."""

    @abstractmethod
    def alpha(self, t: Tensor) -> Tensor: ...

    @abstractmethod
    def sigma(self, t: Tensor) -> Tensor: ...

    @abstractmethod
    def alpha_slope(self, t: Tensor) -> Tensor:
        """d alpha / d t."""

    @abstractmethod
    def sigma_slope(self, t: Tensor) -> Tensor:
        """d sigma / d t, finite on [0, 1]."""

    @abstractmethod
    def time_of(self, log_snr: Tensor) -> Tensor:
        """The t in [0, 1] of this log-SNR, infinite ones included; the nearest end for one beyond the path's."""

    def log_snr(self, t: Tensor) -> Tensor:
        """2 log(alpha / sigma): inf at 0, -inf at 1 where alpha is 0."""
        return 2 * (self.alpha(t).log() - self.sigma(t).log())


class Linear(Path):
    """Rectified flow (Liu et al. 2022, arXiv 2209.03003): alpha = 1 - t, sigma = t."""

    def alpha(self, t: Tensor) -> Tensor:
        return 1 - t

    def sigma(self, t: Tensor) -> Tensor:
        return t

    def alpha_slope(self, t: Tensor) -> Tensor:
        return -torch.ones_like(t)

    def sigma_slope(self, t: Tensor) -> Tensor:
        return torch.ones_like(t)

    def time_of(self, log_snr: Tensor) -> Tensor:
        return torch.sigmoid(-log_snr / 2)


class Cosine(Path):
    """Variance preserving: alpha = cos(pi t / 2), sigma = sin(pi t / 2).

    It's the schedule of Nichol and Dhariwal 2021 (arXiv 2102.09672, eq. 17) without its offset.
    """

    def alpha(self, t: Tensor) -> Tensor:
        # Not the cosine of t: that one isn't exactly 0 at t = 1.
        return torch.sin(math.pi / 2 * (1 - t))

    def sigma(self, t: Tensor) -> Tensor:
        return torch.sin(math.pi / 2 * t)

    def alpha_slope(self, t: Tensor) -> Tensor:
        return -math.pi / 2 * self.sigma(t)

    def sigma_slope(self, t: Tensor) -> Tensor:
        return math.pi / 2 * self.alpha(t)

    def time_of(self, log_snr: Tensor) -> Tensor:
        return (2 / math.pi * torch.atan(torch.exp(-log_snr / 2))).clamp(max=1)


class DDPM(Path):
    """DDPM's 1,000 linear betas, 1e-4 to .02 (Ho et al. 2020, arXiv 2006.11239).

    Their step n, from 1, is at t = n / 1000. log(alpha^2) is linear in between, so slopes jump at a step, where
    rounding decides between both. At t = 1 alpha is .00635, not 0. sigma's slope is infinite at 0 and taken at 1e-5.
    """

    num_betas = 1000

    def alpha(self, t: Tensor) -> Tensor:
        return torch.exp(self._log_alpha_bar(t)[0] / 2)

    def sigma(self, t: Tensor) -> Tensor:
        return torch.sqrt(-torch.expm1(self._log_alpha_bar(t)[0]))

    def alpha_slope(self, t: Tensor) -> Tensor:
        return self.alpha(t) * self._log_alpha_bar(t)[1] / 2

    def sigma_slope(self, t: Tensor) -> Tensor:
        t = t.clamp(min=1e-5)
        return -(self.alpha(t) ** 2) * self._log_alpha_bar(t)[1] / (2 * self.sigma(t))

    def time_of(self, log_snr: Tensor) -> Tensor:
        knots = self._knots(log_snr)
        log_alpha_bar = logsigmoid(log_snr).clamp(min=knots[-1])
        segment = (torch.searchsorted(-knots, -log_alpha_bar.contiguous()) - 1).clamp(0, self.num_betas - 1)
        start, end = knots[segment], knots[segment + 1]
        return (segment + (log_alpha_bar - start) / (end - start)) / self.num_betas

    def _log_alpha_bar(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """log(alpha^2) and its slope."""
        knots, place = self._knots(t), t * self.num_betas
        segment = (place.ceil().long() - 1).clamp(0, self.num_betas - 1)
        rise = knots[segment + 1] - knots[segment]
        return knots[segment] + (place - segment) * rise, rise * self.num_betas

    def _knots(self, like: Tensor) -> Tensor:
        return _ddpm_knots(like.dtype, like.device)


@cache
def _ddpm_knots(dtype: torch.dtype, device: torch.device) -> Tensor:
    betas = torch.linspace(1e-4, 0.02, DDPM.num_betas, dtype=torch.float64)
    return torch.cat([torch.zeros(1, dtype=torch.float64), torch.log1p(-betas).cumsum(0)]).to(device, dtype)


PATHS: dict[str, Path] = {"linear": Linear(), "cosine": Cosine(), "ddpm": DDPM()}
PREDICTIONS = get_args(PredictionName)


@cache
def time_bounds(path: str, max_log_snr: float = MAX_LOG_SNR) -> tuple[float, float]:
    """The times on this path with a log-SNR of `max_log_snr` and -`max_log_snr`, or the path's end before that."""
    earliest, latest = PATHS[path].time_of(torch.tensor([max_log_snr, -max_log_snr], dtype=torch.float64)).tolist()
    return earliest, latest


@dataclass(frozen=True)
class Flow:
    """Path and prediction that a network was trained for. ConfigError for a name not known.

    velocity is d x_t / d t of that path; score is that of p_t: -E[noise | x_t] / sigma(t).
    """

    path: str = "linear"
    prediction: str = "velocity"

    def __post_init__(self) -> None:
        if self.path not in PATHS:
            raise ConfigError(f"unknown path {self.path!r}: use one of {', '.join(PATHS)}")
        if self.prediction not in PREDICTIONS:
            raise ConfigError(f"unknown prediction {self.prediction!r}: use one of {', '.join(PREDICTIONS)}")

    def clamp_to_nonsingular(self, t: Tensor, max_log_snr: float = MAX_LOG_SNR) -> Tensor:
        """`t`, moved to |log SNR| <= `max_log_snr` near an end where this prediction doesn't tell data from noise.

        These ends are 0 for data and score (sigma = 0), 1 for noise and score (alpha = 0); velocity has none.
        """
        earliest, latest = time_bounds(self.path, max_log_snr)
        return t.clamp(
            earliest if self.prediction in ("data", "score") else 0,
            latest if self.prediction in ("noise", "score") else 1,
        )


def append_dims(t_B: Tensor, like: Tensor) -> Tensor:
    """`t_B` with its dtype kept and trailing dimensions of 1, so that it broadcasts over `like` (B, ...)."""
    return t_B.reshape(-1, *([1] * (like.ndim - 1)))


def interpolate(data: Tensor, noise: Tensor, t_B: Tensor, path: str = "linear") -> Tensor:
    """x_t = alpha(t) data + sigma(t) noise; shape and dtype of `data`."""
    t = append_dims(t_B.to(data.dtype), data)
    return PATHS[path].alpha(t) * data + PATHS[path].sigma(t) * noise


def velocity(data: Tensor, noise: Tensor) -> Tensor:
    """d x_t / d t of the linear path, the regression target: noise - data at every t."""
    return noise - data


def target(flow: Flow, data: Tensor, noise: Tensor, t_B: Tensor) -> Tensor:
    """The regression target of a network of this flow at x_t, from data and noise (B, ...); shape and dtype of `data`.

    The score's is -noise / sigma, at the nonsingular time (`Flow.clamp_to_nonsingular`).
    """
    of_data, of_noise = _coefficients(flow, append_dims(flow.clamp_to_nonsingular(t_B.to(data.dtype)), data))
    return of_data * data + of_noise * noise


def to_data_and_noise(flow: Flow, x: Tensor, output: Tensor, t_B: Tensor) -> tuple[Tensor, Tensor]:
    """(data, noise) such that x = alpha data + sigma noise and `output` is their prediction, in x's dtype.

    For an exact prediction they are E[data | x_t] and E[noise | x_t]. At a singular time both equations are those of
    the nonsingular time next to it (`Flow.clamp_to_nonsingular`), so the result is finite at 0 and 1 too.
    """
    t = append_dims(flow.clamp_to_nonsingular(t_B.to(x.dtype)), x)
    alpha, sigma = PATHS[flow.path].alpha(t), PATHS[flow.path].sigma(t)
    of_data, of_noise = _coefficients(flow, t)
    # Of the two equations for data and noise; it is 0 at singular times alone.
    determinant = alpha * of_noise - sigma * of_data
    data = (of_noise * x - sigma * output) / determinant
    return data, (alpha * output - of_data * x) / determinant


def convert(source: Flow, prediction: str, x: Tensor, output: Tensor, t_B: Tensor) -> Tensor:
    """Source's `output` at (x, t) as a `prediction` on the same path."""
    return target(Flow(source.path, prediction), *to_data_and_noise(source, x, output, t_B), t_B)


def gaussian_velocity_slope(t_B: Tensor, data_std: float) -> Tensor:
    """Slope a(t) of the best velocity a(t) x for data ~ N(0, data_std^2): finite on [0, 1], -1 at 0, 1 at 1.

    a = (t - (1-t) s^2) / (t^2 + (1-t)^2 s^2), from E[noise - data | x] of two Gaussians; s > 0.
    """
    variance = data_std**2
    return (t_B - (1 - t_B) * variance) / (t_B**2 + (1 - t_B) ** 2 * variance)


def _coefficients(flow: Flow, t: Tensor) -> tuple[Tensor, Tensor]:
    """(a, b): the prediction is a data + b noise, at a nonsingular t."""
    path, zero, one = PATHS[flow.path], torch.zeros_like(t), torch.ones_like(t)
    if flow.prediction == "velocity":
        return path.alpha_slope(t), path.sigma_slope(t)
    if flow.prediction == "score":
        return zero, -1 / path.sigma(t)
    return (zero, one) if flow.prediction == "noise" else (one, zero)
