"""Strategies: the experts that each image uses, and their weights.

A strategy turns probabilities of the experts into weights of all K of them: >= 0, sum 1 per row, 0 for those that a
row doesn't use. Costs below are experts per velocity; the router is asked once per velocity, or once per step by rows
that hold one expert. Shapes: B rows, K experts.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from ddm_ray.core.names import parse_strategy_name, strategy_form
from ddm_ray.errors import SamplingError


def differs(weights_BK: Tensor, others_BK: Tensor) -> np.ndarray:
    """Bool (B,): rows where another set of experts has weights above 0. On the CPU."""
    return np.asarray(((weights_BK.numpy() > 0) != (others_BK.numpy() > 0)).any(axis=1))


class Strategy(ABC):
    """A way to choose experts. `when`: at the trajectory's start, at each step or at each velocity; `draws`: by chance.

    A strategy that chooses at the start chooses exactly one expert an image; `sampling/driver.py` relies on it. One
    that chooses at each step holds its experts within the step and reweighs them at each velocity. One that chooses at
    each velocity gets no weights before and no uniforms. Rows of equal strategies are routed together, so a strategy is
    a frozen dataclass: hashable, and equal by its numbers.
    """

    when: ClassVar[Literal["start", "step", "velocity"]] = "step"
    draws: ClassVar[bool] = False

    @abstractmethod
    def route(self, probs_BK: Tensor, before_BK: Tensor, uniforms_BK: Tensor | None) -> Tensor:
        """The weights (B, K) for rows with these probabilities of the experts: the router's posterior, or the prior.

        `before_BK`: the weights at the step before, all 0 in rows that are at their first. `uniforms_BK`, for
        strategies that draw: numbers in [0, 1) from a stream that is independent of the images' noise.
        """

    def most(self, num_experts: int) -> int:
        """The most experts that a velocity of one image may take."""
        return 1

    def reweigh(self, held_BK: Tensor, probs_BK: Tensor) -> Tensor:
        """The step's experts with the weights that these probabilities, of a later velocity, give them.

        Rows keep their weights where all their experts have probability 0.
        """
        # With the weights of the step's start, solvers of second order would be of first order.
        weights_BK = probs_BK * (held_BK > 0)
        total_B1 = weights_BK.sum(dim=1, keepdim=True)
        return torch.where(total_B1 > 0, weights_BK / total_B1, held_BK)


@dataclass(frozen=True)
class Full(Strategy):
    """Every expert by its posterior p(k|x,t,c), asked again at every velocity: the paper's ensemble.

    Cost: K. Exact for exact experts and router; the only strategy that follows the same trajectory as one model
    of all the data.
    """

    when = "velocity"

    def most(self, num_experts: int) -> int:
        return num_experts

    def route(self, probs_BK: Tensor, before_BK: Tensor, uniforms_BK: Tensor | None) -> Tensor:
        return keep(probs_BK, probs_BK > 0)


@dataclass(frozen=True)
class Once(Strategy):
    """Ancestral sampling of the mixture: draw k ~ p(k | condition) once, hold it for the whole trajectory.

    Cost: 1, no router in the loop. Exact in distribution for exact experts and prior (not pathwise: endpoints
    differ from `full`). Guided, each image is guided within its drawn cluster: samples come from
    sum_k p(k|c) q_k(x|c), q_k being what guidance alone makes of expert k, while `full` guides the whole
    mixture and so moves weight between clusters too.
    """

    when = "start"
    draws = True

    def route(self, probs_BK: Tensor, before_BK: Tensor, uniforms_BK: Tensor | None) -> Tensor:
        assert uniforms_BK is not None
        return draw_expert(probs_BK, uniforms_BK[:, 0])


@dataclass(frozen=True)
class Oracle(Strategy):
    """The expert of a cluster that is known beforehand, held: p(k) is 1 for one k. The paper's oracle row.

    Cost: 1, no router. Exact for images of that cluster.
    """

    when = "start"

    def route(self, probs_BK: Tensor, before_BK: Tensor, uniforms_BK: Tensor | None) -> Tensor:
        return keep_top(probs_BK, 1)


@dataclass(frozen=True)
class TopK(Strategy):
    """The `kept` likeliest experts of each step: the paper's top-k.

    Cost: `kept`. Biased: near t = 1 the posterior is the prior, so the largest clusters are over-drawn (top-1
    worst), and more steps don't mend it.
    """

    kept: int

    def most(self, num_experts: int) -> int:
        return self.kept

    def route(self, probs_BK: Tensor, before_BK: Tensor, uniforms_BK: Tensor | None) -> Tensor:
        return keep_top(probs_BK, self.kept)


@dataclass(frozen=True)
class Sticky(Strategy):
    """top-1 with hysteresis: an expert is left only for one that is likelier by more than `margin`.

    Cost: 1, with longer segments than top-1's. Biased as top-1 is, since it starts where top-1 does: at the
    likeliest cluster of pure noise, and leaves it later.
    """

    margin: float = 0.1

    def route(self, probs_BK: Tensor, before_BK: Tensor, uniforms_BK: Tensor | None) -> Tensor:
        held_B1 = before_BK.argmax(dim=1, keepdim=True)
        gain_B1 = probs_BK.amax(dim=1, keepdim=True) - probs_BK.gather(1, held_B1)
        stays_B1 = (before_BK.gather(1, held_B1) > 0) & (gain_B1 <= self.margin)
        return torch.where(stays_B1, before_BK, keep_top(probs_BK, 1))


@dataclass(frozen=True)
class Threshold(Strategy):
    """All experts with a probability of at least `least`; the likeliest one in any case (paper, section 4).

    Cost: 1 to 1 / `least`, most near t = 1. Biased by what it drops, below K times `least` of the weight.
    """

    least: float

    def most(self, num_experts: int) -> int:
        return int(min(num_experts, 1 / self.least))

    def route(self, probs_BK: Tensor, before_BK: Tensor, uniforms_BK: Tensor | None) -> Tensor:
        return keep(probs_BK, (probs_BK >= self.least) | (probs_BK == probs_BK.amax(dim=1, keepdim=True)))


@dataclass(frozen=True)
class Nucleus(Strategy):
    """The fewest experts that together have a probability of `mass` (Holtzman et al. 2020, arXiv 1904.09751), mixed.

    `temperature` T takes p^(1/T) for both choice and weights: below 1 sharpens towards top-1, above 1 flattens.
    Cost: 1 to K, most near t = 1. Biased by what it drops, at most 1 - `mass` of the weight, and by T.
    """

    mass: float
    temperature: float = 1.0

    def most(self, num_experts: int) -> int:
        return num_experts

    def route(self, probs_BK: Tensor, before_BK: Tensor, uniforms_BK: Tensor | None) -> Tensor:
        probs_BK = self._tempered(probs_BK)
        sorted_BK, order_BK = torch.sort(probs_BK, dim=1, descending=True, stable=True)
        # An expert is kept if those before it have not reached the mass yet.
        kept_BK = sorted_BK.cumsum(dim=1) - sorted_BK < self.mass
        return keep(probs_BK, torch.zeros_like(kept_BK).scatter(1, order_BK, kept_BK))

    def reweigh(self, held_BK: Tensor, probs_BK: Tensor) -> Tensor:
        return super().reweigh(held_BK, self._tempered(probs_BK))

    def _tempered(self, probs_BK: Tensor) -> Tensor:
        return probs_BK if self.temperature == 1 else (probs_BK.log() / self.temperature).softmax(dim=1)


@dataclass(frozen=True)
class SampleK(Strategy):
    """`drawn` different experts by chance at each step, by their probabilities, weights renormalised.

    Cost: `drawn`. For 1 the mean velocity is that of `full`, and so is the distribution as steps go to infinity;
    for K it is `full`. Between, the mean is biased towards the likely experts: at p = (.80, .15, .05) two drawn
    ones weigh (.85, .13, .02) on average.
    """

    drawn: int
    draws = True

    def most(self, num_experts: int) -> int:
        return self.drawn

    def route(self, probs_BK: Tensor, before_BK: Tensor, uniforms_BK: Tensor | None) -> Tensor:
        assert uniforms_BK is not None
        # The largest of log p + Gumbel noise are draws without replacement (Kool et al. 2019, arXiv 1903.06059).
        tiny = torch.finfo(torch.float64).tiny
        gumbel_BK = -(-uniforms_BK.double().clamp(min=tiny).log()).log()
        chosen_Bk = (probs_BK.double().log() + gumbel_BK).topk(self.drawn, dim=1).indices
        return keep(probs_BK, _among(chosen_Bk, probs_BK))


def parse_strategy(name: str, num_experts: int) -> Strategy:
    """The strategy called `name` (grammar: core.names); SamplingError if there is none for so many experts."""
    try:
        kind, numbers = parse_strategy_name(name, num_experts)
    except ValueError as error:
        raise SamplingError(str(error)) from None
    strategy: Strategy = resolve_name(strategy_form(kind).code)(*numbers)
    return strategy


def keep(probs_BK: Tensor, kept_BK: Tensor) -> Tensor:
    """The entries of each row where `kept_BK` (bool), renormalised to sum 1; one at least must be above 0."""
    weights_BK = probs_BK * kept_BK
    return weights_BK / weights_BK.sum(dim=1, keepdim=True)


def keep_top(probs_BK: Tensor, kept: int) -> Tensor:
    """The `kept` largest entries of each row, renormalised to sum 1; ties go to the lower index."""
    if kept == 1:
        return _one(probs_BK.argmax(dim=1, keepdim=True), probs_BK)
    # A stable sort, because topk leaves the order of ties open and so could differ with the batch.
    order_BK = torch.sort(probs_BK, dim=1, descending=True, stable=True).indices
    return keep(probs_BK, _among(order_BK[:, :kept], probs_BK))


def draw_expert(prior_BK: Tensor, uniforms_B: Tensor) -> Tensor:
    """Weight 1 (B, K) for one expert per row, by the inverse CDF of `prior_BK` at `uniforms_B` in [0, 1).

    The uniforms must come from another stream than the noise: correlated ones bend the result. An expert
    of probability 0 is never drawn.
    """
    # Divided by its own end, so that rounding never leaves a gap below 1 for the last expert to fall into.
    cdf_BK = prior_BK.double().cumsum(dim=1)
    cdf_BK = cdf_BK / cdf_BK[:, -1:]
    return _one(torch.searchsorted(cdf_BK, uniforms_B.double()[:, None].contiguous(), right=True), prior_BK)


def _one(expert_B1: Tensor, like_BK: Tensor) -> Tensor:
    return torch.zeros_like(like_BK).scatter_(1, expert_B1, 1.0)


def _among(experts_Bk: Tensor, like_BK: Tensor) -> Tensor:
    return torch.zeros_like(like_BK, dtype=torch.bool).scatter_(1, experts_Bk, True)
