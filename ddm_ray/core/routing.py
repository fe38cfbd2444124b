"""Strategies: the experts that each image uses, and their weights.

A strategy turns probabilities of the experts into a `Routing`. Costs below are experts per velocity; the router is
asked once per velocity, or once per step where each row has one expert. Shapes: B rows, K experts, k experts kept per
row.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ddm_ray.core.names import parse_strategy_name
from ddm_ray.errors import SamplingError


@dataclass(frozen=True)
class Routing:
    """Experts of each row (int64 in [0, K)) and their weights: >= 0, sum 1 per row, padding has weight 0."""

    experts_Bk: Tensor
    weights_Bk: Tensor

    def __post_init__(self) -> None:
        assert self.experts_Bk.shape == self.weights_Bk.shape
        assert self.experts_Bk.ndim == 2

    @property
    def only_expert_B(self) -> Tensor:
        """Int64 (B,): the one expert of each row, of a strategy that chooses at the start."""
        assert self.experts_Bk.shape[1] == 1, f"{self.experts_Bk.shape[1]} experts a row, though chosen at the start"
        return self.experts_Bk[:, 0]

    def repeat(self, times: int) -> "Routing":
        """The same choice for `times` stacked copies of the rows: (times * B, k)."""
        return Routing(self.experts_Bk.repeat(times, 1), self.weights_Bk.repeat(times, 1))

    def dense(self, num_experts: int) -> Tensor:
        """The weights of all K experts, (B, K)."""
        weights_BK = self.weights_Bk.new_zeros(len(self.weights_Bk), num_experts)
        return weights_BK.scatter_add_(1, self.experts_Bk, self.weights_Bk)

    def differs(self, other: "Routing", num_experts: int) -> Tensor:
        """Bool (B,): rows whose set of experts with a weight above 0 isn't the other's."""
        return ((self.dense(num_experts) > 0) != (other.dense(num_experts) > 0)).any(dim=1)


class Strategy(ABC):
    """A way to choose experts. `when`: at the trajectory's start, at each step or at each velocity; `draws`: by chance.

    A strategy that chooses at the start chooses exactly one expert an image, which whoever samples by such strategies
    relies on. One that chooses at each step holds its experts within the step and reweighs them at each velocity.
    """

    when: ClassVar[Literal["start", "step", "velocity"]] = "step"
    draws: ClassVar[bool] = False

    @abstractmethod
    def route(self, probs_BK: Tensor, before: Routing | None, uniforms_BK: Tensor | None) -> Routing:
        """The routing for rows with these probabilities of the experts: the router's posterior, or the prior.

        `before`: the rows' routing at the step before, None at the first. `uniforms_BK`, for strategies that draw:
        numbers in [0, 1) from a stream that is independent of the images' noise.
        """

    def reweigh(self, held: Routing, probs_BK: Tensor) -> Routing:
        """The step's experts with the weights that these probabilities, of a later velocity, give them.

        Rows whose experts all have probability 0 keep their weights.
        """
        # With the weights of the step's start, solvers of second order would be of first order.
        weights_Bk = probs_BK.gather(1, held.experts_Bk) * (held.weights_Bk > 0)
        total_B1 = weights_Bk.sum(dim=1, keepdim=True)
        return Routing(held.experts_Bk, torch.where(total_B1 > 0, weights_Bk / total_B1, held.weights_Bk))


@dataclass(frozen=True)
class Full(Strategy):
    """Every expert by its posterior p(k|x,t,c), asked anew at every velocity: the paper's ensemble.

    Cost: K. Exact for exact experts and router; the only strategy that follows the same trajectory as one model
    of all the data.
    """

    when = "velocity"

    def route(self, probs_BK: Tensor, before: Routing | None, uniforms_BK: Tensor | None) -> Routing:
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

    def route(self, probs_BK: Tensor, before: Routing | None, uniforms_BK: Tensor | None) -> Routing:
        assert uniforms_BK is not None
        return draw(probs_BK, uniforms_BK[:, 0])


@dataclass(frozen=True)
class Oracle(Strategy):
    """The expert of a cluster that is known beforehand, held: p(k) is 1 for one k. The paper's oracle row.

    Cost: 1, no router. Exact for images of that cluster.
    """

    when = "start"

    def route(self, probs_BK: Tensor, before: Routing | None, uniforms_BK: Tensor | None) -> Routing:
        return keep_top(probs_BK, 1)


@dataclass(frozen=True)
class TopK(Strategy):
    """The `kept` likeliest experts of each step: the paper's top-k.

    Cost: `kept`. Biased: near t = 1 the posterior is the prior, so the largest clusters are over-drawn (top-1
    worst), and more steps don't mend it.
    """

    kept: int

    def route(self, probs_BK: Tensor, before: Routing | None, uniforms_BK: Tensor | None) -> Routing:
        return keep_top(probs_BK, self.kept)


@dataclass(frozen=True)
class Sticky(Strategy):
    """top-1 with hysteresis: an expert is left only for one that is likelier by more than `margin`.

    Cost: 1, with longer segments than top-1's. Biased as top-1 is, since it starts where top-1 does: at the
    likeliest cluster of pure noise, and leaves it later.
    """

    margin: float = 0.1

    def route(self, probs_BK: Tensor, before: Routing | None, uniforms_BK: Tensor | None) -> Routing:
        best = keep_top(probs_BK, 1)
        if before is None:
            return best
        held_B1 = before.experts_Bk[:, :1]
        leaves_B1 = probs_BK.gather(1, best.experts_Bk) - probs_BK.gather(1, held_B1) > self.margin
        return Routing(torch.where(leaves_B1, best.experts_Bk, held_B1), best.weights_Bk)


@dataclass(frozen=True)
class Threshold(Strategy):
    """All experts with a probability of at least `least`; the likeliest one in any case (paper, section 4).

    Cost: 1 to 1 / `least`, most near t = 1. Biased by what it drops, below K times `least` of the weight.
    """

    least: float

    def route(self, probs_BK: Tensor, before: Routing | None, uniforms_BK: Tensor | None) -> Routing:
        return keep(probs_BK, (probs_BK >= self.least) | (probs_BK == probs_BK.amax(dim=1, keepdim=True)))


@dataclass(frozen=True)
class Nucleus(Strategy):
    """The fewest experts that together have a probability of `mass` (Holtzman et al. 2020, arXiv 1904.09751), mixed.

    `temperature` T takes p^(1/T) for both choice and weights: below 1 sharpens towards top-1, above 1 flattens.
    Cost: 1 to K, most near t = 1. Biased by what it drops, at most 1 - `mass` of the weight, and by T.
    """

    mass: float
    temperature: float = 1.0

    def route(self, probs_BK: Tensor, before: Routing | None, uniforms_BK: Tensor | None) -> Routing:
        probs_BK = self._tempered(probs_BK)
        sorted_BK, order_BK = torch.sort(probs_BK, dim=1, descending=True, stable=True)
        # An expert is kept if those before it have not reached the mass yet.
        kept_BK = sorted_BK.cumsum(dim=1) - sorted_BK < self.mass
        return keep(probs_BK, torch.zeros_like(kept_BK).scatter(1, order_BK, kept_BK))

    def reweigh(self, held: Routing, probs_BK: Tensor) -> Routing:
        return super().reweigh(held, self._tempered(probs_BK))

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

    def route(self, probs_BK: Tensor, before: Routing | None, uniforms_BK: Tensor | None) -> Routing:
        assert uniforms_BK is not None
        # The largest of log p + Gumbel noise are draws without replacement (Kool et al. 2019, arXiv 1903.06059).
        tiny = torch.finfo(torch.float64).tiny
        gumbel_BK = -(-uniforms_BK.double().clamp(min=tiny).log()).log()
        chosen_Bk = (probs_BK.double().log() + gumbel_BK).topk(self.drawn, dim=1).indices
        weights_Bk = probs_BK.gather(1, chosen_Bk)
        return Routing(chosen_Bk, weights_Bk / weights_Bk.sum(dim=1, keepdim=True))


KINDS: dict[str, Callable[..., Strategy]] = {
    "full": Full,
    "once": Once,
    "oracle": Oracle,
    "top": lambda kept: TopK(int(kept)),
    "sticky": Sticky,
    "threshold": Threshold,
    "nucleus": Nucleus,
    "sample": lambda drawn: SampleK(int(drawn)),
}
"""Constructors of the strategies of each kind in `names.STRATEGIES`, from the numbers in their names."""


def parse_strategy(name: str, num_experts: int) -> Strategy:
    """The strategy called `name` (grammar: core.names); SamplingError if there is none for so many experts."""
    try:
        kind, numbers = parse_strategy_name(name, num_experts)
    except ValueError as error:
        raise SamplingError(str(error)) from None
    return KINDS[kind](*numbers)


def keep(probs_BK: Tensor, kept_BK: Tensor) -> Routing:
    """The entries of each row where `kept_BK` (bool), renormalised to sum 1; one at least must be above 0."""
    weights_BK = probs_BK * kept_BK
    experts_BK = torch.arange(probs_BK.shape[1]).expand_as(probs_BK)
    return Routing(experts_BK, weights_BK / weights_BK.sum(dim=1, keepdim=True))


def keep_top(probs_BK: Tensor, kept: int) -> Routing:
    """The `kept` largest entries of each row, renormalised to sum 1; ties go to the lower index."""
    # A stable sort, because topk leaves the order of ties open and so could differ with the batch.
    sorted_BK, order_BK = torch.sort(probs_BK, dim=1, descending=True, stable=True)
    top_Bk = sorted_BK[:, :kept]
    return Routing(order_BK[:, :kept], top_Bk / top_Bk.sum(dim=1, keepdim=True))


def draw(prior_BK: Tensor, uniforms_B: Tensor) -> Routing:
    """One expert per row by the inverse CDF of `prior_BK` at `uniforms_B` in [0, 1); weight 1, k = 1.

    The uniforms must come from another stream than the noise: correlated ones bend the result. An expert
    of probability 0 is never drawn.
    """
    # Divided by its own end, so that rounding never leaves a gap below 1 for the last expert to fall into.
    cdf_BK = prior_BK.double().cumsum(dim=1)
    cdf_BK = cdf_BK / cdf_BK[:, -1:]
    experts_B1 = torch.searchsorted(cdf_BK, uniforms_B.double()[:, None].contiguous(), right=True)
    return Routing(experts_B1, torch.ones_like(experts_B1, dtype=prior_BK.dtype))
