"""Strategies: which experts paint an image, with which weights.

Shapes: B rows, K experts, k experts kept per row.
"""

import re
from dataclasses import dataclass

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

    def heaviest(self) -> Tensor:
        """The expert with the largest weight of each row, shape (B,); the first one on ties."""
        return self.experts_Bk.gather(1, self.weights_Bk.argmax(dim=1, keepdim=True))[:, 0]

    def differs(self, other: "Routing", num_experts: int) -> Tensor:
        """Bool (B,): rows whose set of experts with a weight above 0 isn't the other's."""
        return (self._used(num_experts) != other._used(num_experts)).any(dim=1)

    def _used(self, num_experts: int) -> Tensor:
        used_BK = torch.zeros(len(self.experts_Bk), num_experts, dtype=torch.int64)
        return used_BK.scatter_add_(1, self.experts_Bk, (self.weights_Bk > 0).long()) > 0


@dataclass(frozen=True)
class Full:
    """Every expert by its posterior p(k|x,t,c), asked anew at every velocity.

    Cost: all experts and the router per velocity. Exact for exact experts and router; the only strategy
    that follows the same trajectory as one model of all the data.
    """

    name: str = "full"
    needs_router: bool = True
    every_velocity: bool = True

    def route(self, posterior_BK: Tensor) -> Routing:
        return keep_top(posterior_BK, posterior_BK.shape[1])


@dataclass(frozen=True)
class TopK:
    """The `kept` likeliest experts, weights renormalised, chosen at the start of a step and held within it.

    Cost: `kept` experts per velocity and the router once a step. Biased: near t = 1 the posterior is the
    prior, so the largest clusters are over-drawn (top-1 worst), and more steps don't mend it.
    """

    kept: int
    needs_router: bool = True
    every_velocity: bool = False

    @property
    def name(self) -> str:
        return f"top-{self.kept}"

    def route(self, posterior_BK: Tensor) -> Routing:
        return keep_top(posterior_BK, self.kept)


@dataclass(frozen=True)
class Once:
    """Ancestral sampling of the mixture: draw k ~ p(k | condition) once, hold it for the whole trajectory.

    Cost: one expert per velocity, no router. Exact in distribution for exact experts and prior (not
    pathwise: endpoints differ from `full`). Guided, it guides within the drawn cluster.
    """

    name: str = "once"
    needs_router: bool = False
    every_velocity: bool = False

    def draw(self, prior_BK: Tensor, uniforms_B: Tensor) -> Routing:
        return draw(prior_BK, uniforms_B)


Strategy = Full | TopK | Once


def parse_strategy(name: str, num_experts: int) -> Strategy:
    """The strategy called `name`: full, once, or top-1 to top-`num_experts`; else SamplingError."""
    if name == "full":
        return Full()
    if name == "once":
        return Once()
    top = re.fullmatch(r"top-([1-9][0-9]*)", name)
    if top and int(top[1]) <= num_experts:
        return TopK(int(top[1]))
    largest = f"top-1 to top-{num_experts}" if num_experts > 1 else "top-1"
    raise SamplingError(f"unknown strategy {name!r} for {num_experts} experts: use full, once or {largest}")


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
    experts_B1 = torch.searchsorted(cdf_BK, uniforms_B.double()[:, None], right=True)
    return Routing(experts_B1, torch.ones_like(experts_B1, dtype=prior_BK.dtype))
