"""Strategies: which experts paint an image, with which weights.

A strategy turns probabilities of the experts into a `Routing`. What it costs is counted in experts per velocity; the
router costs once per step, or once per velocity for `full`. Shapes: B rows, K experts, k experts kept per row.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ddm_ray.errors import SamplingError


@dataclass(frozen=True)
class Routing:
    """Experts of each row (int64 in [0, K)) and their weights: >= 0, sum 1 per row, padding has weight 0."""

    experts_Bk: Tensor
    weights_Bk: Tensor

    def __post_init__(self) -> None:
        assert self.experts_Bk.shape == self.weights_Bk.shape
        assert self.experts_Bk.ndim == 2

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
    """A way to choose experts: `when` (at the trajectory's start, each step, each velocity), and if by chance."""

    when: ClassVar[Literal["start", "step", "velocity"]] = "step"
    draws: ClassVar[bool] = False

    @abstractmethod
    def route(self, probs_BK: Tensor, before: Routing | None, uniforms_BK: Tensor | None) -> Routing:
        """The routing for rows with these probabilities of the experts: the router's posterior, or the prior.

        `before`: the rows' routing at the step before, None at the first. `uniforms_BK`, for strategies that draw:
        numbers in [0, 1) from a stream that has nothing to do with the images' noise.
        """


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
    """The `kept` likeliest experts, chosen at the start of a step and held within it.

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
    """The fewest experts that together have a probability of `mass`, mixed, not drawn.

    `temperature` T takes p^(1/T) for both choice and weights: below 1 sharpens towards top-1, above 1 flattens.
    Cost: 1 to K, most near t = 1. Biased by what it drops, at most 1 - `mass` of the weight, and by T.
    """

    mass: float
    temperature: float = 1.0

    def route(self, probs_BK: Tensor, before: Routing | None, uniforms_BK: Tensor | None) -> Routing:
        if self.temperature != 1:
            probs_BK = (probs_BK.log() / self.temperature).softmax(dim=1)
        sorted_BK, order_BK = torch.sort(probs_BK, dim=1, descending=True, stable=True)
        # An expert is kept if those before it have not reached the mass yet.
        kept_BK = sorted_BK.cumsum(dim=1) - sorted_BK < self.mass
        return keep(probs_BK, torch.zeros_like(kept_BK).scatter(1, order_BK, kept_BK))


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
        # The largest of log p + Gumbel noise are draws without replacement.
        tiny = torch.finfo(torch.float64).tiny
        gumbel_BK = -(-uniforms_BK.double().clamp(min=tiny).log()).log()
        chosen_Bk = (probs_BK.double().log() + gumbel_BK).topk(self.drawn, dim=1).indices
        weights_Bk = probs_BK.gather(1, chosen_Bk)
        return Routing(chosen_Bk, weights_Bk / weights_Bk.sum(dim=1, keepdim=True))


NUMBER = r"(\d+(?:\.\d+)?)"
GRAMMAR: dict[str, Callable[..., Strategy]] = {
    "full": Full,
    "once": Once,
    "oracle": Oracle,
    r"top-([1-9]\d*)": lambda kept: TopK(int(kept)),
    rf"sticky(?:-{NUMBER})?": lambda margin: Sticky() if margin is None else Sticky(float(margin)),
    rf"threshold-{NUMBER}": lambda least: Threshold(float(least)),
    rf"nucleus-{NUMBER}(?:-{NUMBER})?": lambda mass, T: Nucleus(float(mass), 1.0 if T is None else float(T)),
    r"sample-([1-9]\d*)": lambda drawn: SampleK(int(drawn)),
}


def parse_strategy(name: str, num_experts: int) -> Strategy:
    """The strategy called `name`, SamplingError if there is none.

    full, once, oracle, top-k, sample-k (k from 1 to K), sticky or sticky-M (margin M in [0, 1)), threshold-P
    (P in (0, 1)), nucleus-P or nucleus-P-T (P in (0, 1], temperature T > 0).
    """
    for pattern, build in GRAMMAR.items():
        if match := re.fullmatch(pattern, name):
            strategy = build(*match.groups())
            if _in_range(strategy, num_experts):
                return strategy
    raise SamplingError(
        f"unknown strategy {name!r} for {num_experts} experts: use once, full, oracle, top-k, sample-k (k from 1 to"
        f" {num_experts}), sticky-M (M in [0, 1)), threshold-P (P in (0, 1)), nucleus-P or nucleus-P-T (P in (0, 1],"
        " temperature T > 0)"
    )


def _in_range(strategy: Strategy, num_experts: int) -> bool:
    match strategy:
        case TopK(kept=number) | SampleK(drawn=number):
            return number <= num_experts
        case Sticky(margin=margin):
            return margin < 1
        case Threshold(least=least):
            return 0 < least < 1
        case Nucleus(mass=mass, temperature=temperature):
            return 0 < mass <= 1 and temperature > 0
    return True


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
