"""AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101, algorithm 2), by torch's fused kernel or compiled."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from ddm_ray.train.optimizer import Betas, Moments, Scalars, ShardOptimizer

EPSILON = 1e-8


class AdamW(ShardOptimizer):
    """torch's own: the same bits where it isn't compiled."""

    moments = ("exp_avg", "exp_avg_sq")

    def step_group(self, group: dict[str, Any], shards: list[Any], finite: Tensor | None) -> None:
        states = [self.state[shard] for shard in shards]
        adamw(
            shards,
            [shard.grad for shard in shards],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            max_exp_avg_sqs=[],
            state_steps=[state["step"] for state in states],
            fused=True,
            found_inf=None if finite is None else (~finite).float(),
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=EPSILON,
            maximize=False,
        )

    def scalars(self, group: dict[str, Any], step: Tensor) -> Scalars:
        """Share of the value that its decay leaves, size of a step, root of the second moment's correction."""
        beta_1, beta_2 = group["betas"]
        rate = torch.full_like(step, group["lr"])
        return 1 - rate * group["weight_decay"], rate / (1 - beta_1**step), (1 - beta_2**step).sqrt()

    @staticmethod
    def updated(value: Tensor, gradient: Tensor, moments: Moments, scalars: Scalars, betas: Betas) -> Moments:
        (mean, square), (kept, size, root), (beta_1, beta_2) = moments, scalars, betas
        mean = torch.lerp(mean, gradient, 1 - beta_1)
        square = beta_2 * square + (1 - beta_2) * gradient.square()
        return kept * value - size * mean / (square.sqrt() / root + EPSILON), mean, square
