"""Mixtures with a fault in their weights, as implementations may have: what each makes of the paper's odd rows.

Shapes: B rows, CHW image, K experts.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ddm_ray.core.condition import Condition
from ddm_ray.core.mixture import group_rows, mix, posterior
from ddm_ray.core.routing import draw, keep, keep_top, parse_strategy
from ddm_ray.run.run import Run
from ddm_ray.sampling.run_models import Models, monolith_info

Weigh = Callable[[Tensor, torch.Generator], Tensor]
"""Weights (B, K) by the posterior (B, K), some of them by chance."""


def _not_renormalised(strategy: str) -> Weigh:
    """The posterior's own weights of the experts that a strategy keeps, whose sum is below 1."""

    def weigh(probs_BK: Tensor, random: torch.Generator) -> Tensor:
        uniforms_BK = torch.rand(probs_BK.shape, generator=random, dtype=torch.float64)
        routed_BK = parse_strategy(strategy, probs_BK.shape[1]).route(probs_BK, torch.zeros_like(probs_BK), uniforms_BK)
        return probs_BK * (routed_BK > 0)

    return weigh


def _drawn_for_all(probs_BK: Tensor, random: torch.Generator) -> Tensor:
    """One number for all images of a batch: at pure noise they all have the same expert."""
    return draw(probs_BK, torch.rand(1, generator=random, dtype=torch.float64).expand(len(probs_BK)))


def _drawn_evenly(probs_BK: Tensor, random: torch.Generator) -> Tensor:
    """Any expert as likely as any other, at each step."""
    return keep_top(torch.rand(probs_BK.shape, generator=random, dtype=probs_BK.dtype), 1)


def _nucleus_drawn_from(probs_BK: Tensor, random: torch.Generator) -> Tensor:
    """One expert drawn from the nucleus, as a word is, by the weight that the posterior has for it."""
    nucleus_BK = parse_strategy("nucleus-0.9", probs_BK.shape[1]).route(probs_BK, torch.zeros_like(probs_BK), None)
    return probs_BK * draw(nucleus_BK, torch.rand(len(probs_BK), generator=random, dtype=torch.float64))


def _nucleus_short_of_bound(probs_BK: Tensor, random: torch.Generator) -> Tensor:
    """The likeliest experts that together have at most 0.9, renormalised: none, where one alone has more."""
    sorted_BK, order_BK = probs_BK.sort(dim=1, descending=True)
    kept_BK = sorted_BK.cumsum(dim=1) <= 0.9
    return keep(probs_BK, torch.zeros_like(kept_BK).scatter(1, order_BK, kept_BK)).nan_to_num(0)


FAULTS: dict[str, Weigh] = {
    "sample-1, not renormalised": _not_renormalised("sample-1"),
    "sample-1, one draw for all": _drawn_for_all,
    "sample-1, router not asked": _drawn_evenly,
    "top-2, not renormalised": _not_renormalised("top-2"),
    "nucleus-0.9, not renormalised": _not_renormalised("nucleus-0.9"),
    "nucleus-0.9, one drawn": _nucleus_drawn_from,
    "nucleus-0.9, bound left out": _nucleus_short_of_bound,
}


@dataclass(eq=False)
class Faulty:
    """A field whose velocity is the mixture's by these weights."""

    mixture: Models
    weigh: Weigh
    random: torch.Generator

    def __call__(self, x_BCHW: Tensor, t_B: Tensor, condition: Condition) -> Tensor:
        """Velocities (B, C, H, W)."""
        assert isinstance(self.mixture.router, nn.Module)
        logits_BK = self.mixture.router(x_BCHW, t_B, condition).to("cpu", torch.float32)
        weights_BK = self.weigh(posterior(logits_BK), self.random)
        groups, velocities = group_rows((weights_BK > 0).numpy()), []
        if not groups:
            return torch.zeros_like(x_BCHW)
        for group in groups:
            rows_R = torch.arange(len(x_BCHW)) if group.rows_R is None else group.rows_R
            field = self.mixture.experts[group.expert]
            assert field is not None
            velocities.append(field(x_BCHW[rows_R], t_B[rows_R], condition[rows_R]))
        return mix(groups, velocities, weights_BK.to(x_BCHW.device))


def faulty(run: Run, mixture: Models, fault: str, seed: int) -> Models:
    """The run's mixture with this fault, as one network."""
    field = Faulty(mixture, FAULTS[fault], torch.Generator().manual_seed(seed))
    return Models(monolith_info(run), (field,), None, mixture.device)
