"""Classifier-free guidance of a mixture."""

from torch import Tensor


def guide(conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
    """v_uncond + scale (v_cond - v_uncond); 1 is the conditional field, 0 the unconditional one.

    For a mixture this is exact only *after* mixing: sum_k p(k|x,t,c) u_k(x,t,c) and sum_k p(k|x,t) u_k(x,t)
    each under its own posterior, then combined. Guiding each expert and mixing under one posterior is another
    field (relative error .5 to .9 where tried). Sparse strategies use one choice of experts for both
    branches, so they guide within the chosen clusters: a different distribution, by name.
    """
    return unconditional + scale * (conditional - unconditional)
