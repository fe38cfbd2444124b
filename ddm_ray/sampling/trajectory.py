"""One request's way from noise to images, as a generator that says which experts to call with what.

Sans-IO: the in-process driver and the server run this very code. Shapes: B images of the request, R rows of
one call, CHW image, K experts, C = num_classes + 1 conditions (the last is the null one), S steps.
"""

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ddm_ray.core.guidance import guide
from ddm_ray.core.mixture import alive_prior, group_rows, mix, posterior
from ddm_ray.core.routing import Once, Routing, Strategy, parse_strategy
from ddm_ray.core.solvers import SOLVERS, Answer, Ask, uniform_times
from ddm_ray.core.streams import NOISE, ROUTING, stream
from ddm_ray.errors import SamplingError


@dataclass(frozen=True)
class SampleRequest:
    """Images wanted: one seed (0 to 2^64 - 1) and one label (int64, `num_classes` = unconditional) for each.

    `guidance_scale` 1 evaluates the conditional branch alone, 0 the unconditional one alone (labels are then
    ignored), any other both.
    """

    seeds: tuple[int, ...]
    label_B: Tensor
    steps: int = 25
    guidance_scale: float = 1.0
    strategy: str = "once"
    solver: str = "ab2"


@dataclass(frozen=True)
class MixtureInfo:
    """What a sampler knows of a mixture. prior_CK: row c is p(k|c), the last one p(k).

    `alive_K` (bool, None: all) says which experts can be called; prior and posteriors renormalise over them.
    Noise and state have `dtype`; the noise is drawn in float32 in any case.
    """

    num_experts: int
    image_shape: tuple[int, int, int]
    num_classes: int
    prior_CK: Tensor
    alive_K: Tensor | None = None
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        for name, tensor, shape in (
            ("prior_CK", self.prior_CK, (self.num_classes + 1, self.num_experts)),
            ("alive_K", self.alive_K, (self.num_experts,)),
        ):
            if tensor is not None and tuple(tensor.shape) != shape:
                raise SamplingError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}")

    @classmethod
    def from_counts(
        cls, counts_CK: Tensor, image_shape: tuple[int, int, int], alive_K: Tensor | None = None
    ) -> "MixtureInfo":
        """From row counts per class and expert, last row: all rows per expert, labelled or not.

        A class without rows falls back to the marginal; SamplingError if the last row is all zero.
        """
        counts_CK = counts_CK.double()
        if counts_CK.ndim != 2 or counts_CK[-1].sum() <= 0:
            raise SamplingError("counts_CK needs rows in its last line, the totals per expert")
        present_C1 = counts_CK.sum(dim=1, keepdim=True) > 0
        filled_CK = torch.where(present_C1, counts_CK, counts_CK[-1])
        prior_CK = filled_CK / filled_CK.sum(dim=1, keepdim=True)
        num_conditions, num_experts = counts_CK.shape
        return cls(num_experts, image_shape, num_conditions - 1, prior_CK, alive_K)

    def with_alive(self, alive_K: Tensor) -> "MixtureInfo":
        return replace(self, alive_K=alive_K)


@dataclass(frozen=True)
class ExpertCall:
    """Wanted: the velocity (R, C, H, W) of one expert at x_BCHW, t_B in [0, 1], label_B int64."""

    expert: int
    x_BCHW: Tensor
    t_B: Tensor
    label_B: Tensor


@dataclass(frozen=True)
class RouterCall:
    """Wanted: the router's logits (R, K) at x_BCHW, t_B in [0, 1], label_B int64."""

    x_BCHW: Tensor
    t_B: Tensor
    label_B: Tensor


Call = ExpertCall | RouterCall


@dataclass(frozen=True)
class Sampled:
    """Images, the heaviest expert per step and image (int64, conditional branch), and the rows paid for."""

    images_BCHW: Tensor
    experts_SB: Tensor
    num_expert_rows: int
    num_router_rows: int


def initial_noise(seeds: Sequence[int], shape: tuple[int, int, int]) -> Tensor:
    """Standard normal float32 (B, *shape), each image by its own seed alone, on the CPU."""
    drawn = [stream(seed, NOISE).standard_normal(shape, np.float32) for seed in seeds]
    return torch.from_numpy(np.stack(drawn))


def routing_uniforms(seeds: Sequence[int]) -> Tensor:
    """Uniforms on [0, 1), float64 (B,), each by its own seed, from another stream than the noise."""
    return torch.tensor([stream(seed, ROUTING).random() for seed in seeds], dtype=torch.float64)


def trajectories(request: SampleRequest, info: MixtureInfo) -> Generator[list[Call], list[Tensor], Sampled]:
    """Yields lists of calls that may run concurrently, is sent their results in order, returns `Sampled`.

    SamplingError at once for a request that can't be met, and later for a velocity or logits not finite.
    """
    return _Trajectories(request, info, validate(request, info)).run()


def validate(request: SampleRequest, info: MixtureInfo) -> Strategy:
    """The request's strategy, or SamplingError saying which field can't be met by this mixture and why."""
    label_B, num_images, scale = request.label_B, len(request.seeds), request.guidance_scale
    if not num_images or tuple(label_B.shape) != (num_images,):
        raise SamplingError(f"{num_images} seeds with labels of shape {tuple(label_B.shape)}: give one each")
    if label_B.dtype != torch.int64 or label_B.min() < 0 or label_B.max() > info.num_classes:
        raise SamplingError(f"labels must be int64 from 0 to {info.num_classes} ({info.num_classes}: no class)")
    if any(not 0 <= seed < 2**64 for seed in request.seeds):
        raise SamplingError("seeds must be from 0 to 2^64 - 1")
    if request.steps < 1:
        raise SamplingError(f"steps is {request.steps}: use 1 or more")
    if not math.isfinite(scale):
        raise SamplingError(f"guidance_scale is {scale}: use a finite number, 1 for none")
    if info.num_classes == 0 and scale not in (0, 1):
        raise SamplingError(f"guidance_scale is {scale}, but the models have no classes to guide to: use 1")
    if request.solver not in SOLVERS:
        raise SamplingError(f"unknown solver {request.solver!r}: use one of {', '.join(SOLVERS)}")
    return parse_strategy(request.strategy, info.num_experts)


class _Trajectories:
    """The state of one request; its rows are the images once per branch, the conditional branch first."""

    def __init__(self, request: SampleRequest, info: MixtureInfo, strategy: Strategy) -> None:
        self.request, self.info, self.strategy = request, info, strategy
        null_B = torch.full_like(request.label_B, info.num_classes)
        scale = request.guidance_scale
        self.branches = {1.0: [request.label_B], 0.0: [null_B]}.get(scale, [request.label_B, null_B])
        self.num_expert_rows = self.num_router_rows = 0
        self.chosen: list[Tensor] = []
        prior_CK = alive_prior(info.prior_CK, info.alive_K)
        self.held: Routing | None = None
        if isinstance(strategy, Once):
            self.held = strategy.draw(prior_CK[self.branches[0]], routing_uniforms(request.seeds))

    def run(self) -> Generator[list[Call], list[Tensor], Sampled]:
        noise = initial_noise(self.request.seeds, self.info.image_shape).to(self.info.dtype)
        solver = SOLVERS[self.request.solver](noise, uniform_times(self.request.steps))
        ask = next(solver)
        while True:
            routing, switched_B = yield from self._route(ask)
            # The first rows are the conditional branch, or the only one.
            if ask.new_step:
                self.chosen.append(routing.heaviest()[: len(self.request.seeds)])
            velocity = yield from self._velocity(ask, routing)
            try:
                ask = solver.send(Answer(velocity, switched_B))
            except StopIteration as end:
                return Sampled(end.value, torch.stack(self.chosen), self.num_expert_rows, self.num_router_rows)

    def _route(self, ask: Ask) -> Generator[list[Call], list[Tensor], tuple[Routing, Tensor | None]]:
        """The routing of all branches' rows here, and the images whose held experts have just changed."""
        switched_B = None
        if isinstance(self.strategy, Once):
            assert self.held is not None
        elif self.strategy.every_velocity:
            # Each branch under its own posterior: that is what makes guidance of the mixture exact.
            return self.strategy.route((yield from self._posterior(ask, self.branches))), None
        elif ask.new_step:
            before = self.held
            self.held = self.strategy.route((yield from self._posterior(ask, self.branches[:1])))
            switched_B = self.held.differs(before, self.info.num_experts) if before else None
        assert self.held is not None
        return self.held.repeat(len(self.branches)), switched_B

    def _posterior(self, ask: Ask, branches: list[Tensor]) -> Generator[list[Call], list[Tensor], Tensor]:
        call = RouterCall(*self._rows(ask, branches))
        self.num_router_rows += len(call.x_BCHW)
        (logits_RK,) = yield [call]
        return posterior(logits_RK.to(ask.x_BCHW), self.info.alive_K)

    def _velocity(self, ask: Ask, routing: Routing) -> Generator[list[Call], list[Tensor], Tensor]:
        x_RCHW, t_R, label_R = self._rows(ask, self.branches)
        groups = group_rows(routing)
        calls = [ExpertCall(g.expert, x_RCHW[g.rows_R], t_R[g.rows_R], label_R[g.rows_R]) for g in groups]
        self.num_expert_rows += sum(len(call.x_BCHW) for call in calls)
        results = yield list[Call](calls)
        # Answers may come in another precision or from another device than the state's.
        velocities = [result.to(x_RCHW) for result in results]
        for call, velocity in zip(calls, velocities, strict=True):
            assert velocity.shape == call.x_BCHW.shape
            if not velocity.isfinite().all():
                raise SamplingError(f"expert {call.expert} gave a velocity that isn't finite at t = {ask.t:.4g}")
        mixed = mix(groups, velocities, len(x_RCHW))
        if len(self.branches) == 1:
            return mixed
        conditional, unconditional = mixed.chunk(2)
        return guide(conditional, unconditional, self.request.guidance_scale)

    def _rows(self, ask: Ask, branches: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        x_RCHW = ask.x_BCHW.repeat(len(branches), 1, 1, 1)
        return x_RCHW, x_RCHW.new_full((len(x_RCHW),), ask.t), torch.cat(branches)
