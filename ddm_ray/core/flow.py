"""The linear path between data and noise, and what follows from it.

Shapes: B batch, ... any further dimensions. Times are in [0, 1]: 0 is data, 1 is noise.
"""

from torch import Tensor


def along_batch(t_B: Tensor, like: Tensor) -> Tensor:
    """`t_B` with its dtype kept and trailing dimensions of 1, so that it broadcasts over `like` (B, ...)."""
    return t_B.reshape(-1, *([1] * (like.ndim - 1)))


def interpolate(data: Tensor, noise: Tensor, t_B: Tensor) -> Tensor:
    """x_t = (1-t) data + t noise; shape and dtype of `data`."""
    t = along_batch(t_B.to(data.dtype), data)
    return (1 - t) * data + t * noise


def velocity(data: Tensor, noise: Tensor) -> Tensor:
    """d x_t / d t of the linear path, the regression target: noise - data at every t."""
    return noise - data


def data_from_velocity(x: Tensor, velocity: Tensor, t_B: Tensor) -> Tensor:
    """The data end of the straight line through (x, t) with this velocity: x - t v."""
    return x - along_batch(t_B.to(x.dtype), x) * velocity


def noise_from_velocity(x: Tensor, velocity: Tensor, t_B: Tensor) -> Tensor:
    """The noise end of the straight line through (x, t) with this velocity: x + (1-t) v."""
    return x + (1 - along_batch(t_B.to(x.dtype), x)) * velocity


def gaussian_velocity_slope(t_B: Tensor, data_std: float) -> Tensor:
    """Slope a(t) of the best velocity a(t) x for data ~ N(0, data_std^2): finite on [0, 1], -1 at 0, 1 at 1.

    a = (t - (1-t) s^2) / (t^2 + (1-t)^2 s^2), from E[noise - data | x] of two Gaussians; s > 0.
    """
    variance = data_std**2
    return (t_B - (1 - t_B) * variance) / (t_B**2 + (1 - t_B) ** 2 * variance)
