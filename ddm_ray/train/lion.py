"""Lion (Chen et al. 2023, arXiv 2302.06675, algorithm 2): steps of one size in each element, by the sign of a mean."""

from typing import Any

import torch
from torch import Tensor

from ddm_ray.train.optimizer import Betas, Moments, Scalars, ShardOptimizer


class Lion(ShardOptimizer):
    """One moment, a third to a tenth of AdamW's rate, and as many times its weight decay; betas 0.9 and 0.99."""

    moments = ("exp_avg",)

    def scalars(self, group: dict[str, Any], step: Tensor) -> Scalars:
        """Share of the value that its decay leaves, and the size of a step."""
        rate = torch.full_like(step, group["lr"])
        return 1 - rate * group["weight_decay"], rate

    @staticmethod
    def updated(value: Tensor, gradient: Tensor, moments: Moments, scalars: Scalars, betas: Betas) -> Moments:
        (mean,), (kept, size), (beta_1, beta_2) = moments, scalars, betas
        return kept * value - size * torch.lerp(mean, gradient, 1 - beta_1).sign(), torch.lerp(
            mean, gradient, 1 - beta_2
        )
