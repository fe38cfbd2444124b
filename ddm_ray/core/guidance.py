"""Classifier-free guidance of a mixture, and the times at which it acts."""

from torch import Tensor

from ddm_ray.core.flow import append_dims


def guide(conditional: Tensor, unconditional: Tensor, scale: float | Tensor) -> Tensor:
    """v_uncond + scale (v_cond - v_uncond) (Ho and Salimans 2022, arXiv 2207.12598); 1 is conditional, 0 unconditional.

    Velocities are (B, ...), the scale one number or one a row, (B,).

    For a mixture this is exact only *after* mixing: sum_k p(k|x,t,c) u_k(x,t,c) and sum_k p(k|x,t) u_k(x,t)
    each under its own posterior, then combined (guidance "mixture", strategy `full`). "per-expert" is the paper's:
    sum_k p(k|x,t,c) [u_k(x,t) + scale (u_k(x,t,c) - u_k(x,t))], each expert guided by itself under the conditional
    posterior; another field (relative error .4 to .9 where tried). Guidance then sharpens what each expert makes,
    and doesn't move weight between experts. Sparse strategies do the same within the experts that they chose; under
    `once` samples come from sum_k p(k|c) q_k(x|c), q_k being the guided distribution of expert k alone.

    All but "mixture" under `full` jump at scale 0: without a condition they choose and weigh experts by p(k|x,t) and
    p(k), at any other scale, however small, by p(k|x,t,c) and p(k|c).
    """
    by = append_dims(scale, conditional) if isinstance(scale, Tensor) else scale
    return unconditional + by * (conditional - unconditional)


def scale_within(interval: tuple[float, float], t: float, scale: float) -> float:
    """The scale of a step that begins at t: 1 outside of (low, high] (Kynkaanniemi et al. 2024, arXiv 2404.07724).

    The step goes down from t, so it isn't guided at the lower end itself, unless that is 0.
    """
    low, high = interval
    return scale if t <= high and (t > low or low == 0) else 1.0
