"""Classifier-free guidance of a mixture."""

from torch import Tensor


def guide(conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
    """v_uncond + scale (v_cond - v_uncond); 1 is the conditional field, 0 the unconditional one.

    For a mixture this is exact only *after* mixing: sum_k p(k|x,t,c) u_k(x,t,c) and sum_k p(k|x,t) u_k(x,t)
    each under its own posterior, then combined (guidance "mixture", strategy `full`). "per-expert" is the paper's:
    sum_k p(k|x,t,c) [u_k(x,t) + scale (u_k(x,t,c) - u_k(x,t))], each expert guided by itself under the conditional
    posterior; another field (relative error .5 to .9 where tried). It lets guidance sharpen what an expert paints,
    but not which experts paint. Sparse strategies do the same within the experts that they chose; under `once`
    samples come from sum_k p(k|c) q_k(x|c), q_k being the guided distribution of expert k alone.
    """
    return unconditional + scale * (conditional - unconditional)
