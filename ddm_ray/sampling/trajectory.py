"""One request's way from noise to images, as a generator that says which networks to call with what.

Sans-IO: the in-process driver and the server run this very code. Shapes: B images of the request, R rows of one
call, CHW image, K experts, S steps.
"""

from collections.abc import Callable, Generator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ddm_ray.core.condition import Condition, Text, join
from ddm_ray.core.guidance import guide
from ddm_ray.core.mixture import ExpertRows, available_prior, group_rows, mix, posterior
from ddm_ray.core.routing import Oracle, Routing
from ddm_ray.core.solvers import SOLVERS, Answer, Ask
from ddm_ray.core.streams import NOISE, ROUTING, stream
from ddm_ray.core.times import time_grid
from ddm_ray.errors import ExpertCountError, NotFiniteError, SamplingError, TimeError
from ddm_ray.sampling.request import Call, ExpertCall, MixtureInfo, RouterCall, SampleRequest, SampleResult, validate

Calls = Generator[list[Call], list[Tensor], SampleResult]
Branches = tuple[bool, ...]
"""Branches to evaluate, in this order: True is the conditional one, False the unconditional one."""
CONDITIONAL, UNCONDITIONAL, BOTH = (True,), (False,), (True, False)
OnStep = Callable[[int, float, Tensor], None]
"""Called after each step with its number from 0, the t that it ended at, x_BCHW there."""


def initial_noise(seeds: Sequence[int], shape: tuple[int, int, int], purpose: int = NOISE) -> Tensor:
    """Standard normal float32 (B, *shape), each image by its own seed and the purpose alone, on the CPU."""
    drawn = [stream(seed, purpose).standard_normal(shape, np.float32) for seed in seeds]
    return torch.from_numpy(np.stack(drawn))


def routing_uniforms(seeds: Sequence[int], num_experts: int, step: int) -> Tensor:
    """Uniforms on [0, 1), float64 (B, K), each image by its own seed and the step, in another stream than the noise."""
    return torch.from_numpy(np.stack([stream(seed, ROUTING, step).random(num_experts) for seed in seeds]))


class Trajectories:
    """The state of one request; its rows are the images once per branch, the conditional branch first.

    SamplingError for a request that can't be met.
    """

    def __init__(self, request: SampleRequest, info: MixtureInfo) -> None:
        self.request, self.info, self.strategy = request, info, validate(request, info)
        self.calibration = info.calibration(self.request.settings.router_temperature)
        self.num_expert_rows = self.num_router_rows = 0
        self.trace: list[Tensor] = []
        self.held: Routing | None = None
        self.scale: float | None = None
        self.conditions: dict[Branches, Condition] = {}
        self.parts: dict[tuple[Branches, int], tuple[Tensor, Condition]] = {}

    def run(self, on_step: OnStep | None = None) -> Calls:
        """All steps, from the request's noise to its images."""
        settings = self.request.settings
        noise = initial_noise(self.request.seeds, self.info.image_shape).to(self.info.dtype)
        solver = SOLVERS[settings.solver](noise, time_grid(settings.times, settings.steps))
        ask = next(solver)
        while True:
            if on_step and ask.new_step and self.trace:
                on_step(len(self.trace) - 1, ask.t, ask.x_BCHW)
            answer = yield from self.answer(ask)
            try:
                ask = solver.send(answer)
            except StopIteration as end:
                if on_step:
                    on_step(len(self.trace) - 1, 0.0, end.value)
                return SampleResult(end.value, torch.stack(self.trace), self.num_expert_rows, self.num_router_rows)

    def answer(self, ask: Ask) -> Generator[list[Call], list[Tensor], Answer]:
        """The mixture's velocity at (x, t): routed, mixed and guided. TimeError for t outside [0, 1]."""
        if not 0 <= ask.t <= 1:
            raise TimeError(f"t is {ask.t}: times are in [0, 1], 0 is data and 1 is noise")
        # As the routing of sparse strategies, guidance sets in and ends between steps, not within one.
        before = self.scale
        scale = self._scale(ask.t) if ask.new_step or before is None else before
        branches = {1.0: CONDITIONAL, 0.0: UNCONDITIONAL}.get(scale, BOTH)
        self.scale = scale
        routing, switched_B = yield from self._route(ask, branches)
        if ask.new_step:
            if before not in (None, scale):
                # Where guidance sets in or ends the field jumps, as at a switch of expert.
                switched_B = torch.ones(len(self.request.seeds), dtype=torch.bool)
            # The first rows are the conditional branch, or the only one.
            self.trace.append(routing.dense(self.info.num_experts)[: len(self.request.seeds)])
        mixed = yield from self._mixed(ask, branches, routing)
        if len(branches) == 1:
            return Answer(mixed, switched_B)
        conditional, unconditional = mixed.chunk(2)
        return Answer(guide(conditional, unconditional, scale), switched_B)

    def start(self) -> Generator[list[Call], list[Tensor], Routing]:
        """The choice of a strategy that chooses once for all, before the first step: by p(k | condition)."""
        if self.held is None:
            probs_BK = yield from self._prior()
            self.held = self.strategy.route(probs_BK, None, self._uniforms())
        return self.held

    def _uniforms(self) -> Tensor | None:
        if not self.strategy.draws:
            return None
        return routing_uniforms(self.request.seeds, self.info.num_experts, len(self.trace))

    def _scale(self, t: float) -> float:
        """The guidance scale of a step that begins at t: it goes down from there, so not at the lower end itself."""
        low, high = self.request.settings.guidance_interval
        return self.request.settings.guidance_scale if t <= high and (t > low or low == 0) else 1.0

    def _condition(self, branches: Branches) -> Condition:
        """The conditions of all rows; made once, since texts are large."""
        if branches not in self.conditions:
            self.conditions[branches] = join(
                [
                    self.request.condition if conditional else self.info.null(len(self.request.seeds))
                    for conditional in branches
                ]
            )
        return self.conditions[branches]

    def _condition_of(self, branches: Branches, group: ExpertRows) -> Condition:
        """Conditions of one expert's rows; the last ones again where it has the same rows."""
        condition = self._condition(branches)
        if len(group.rows_R) == len(condition):
            return condition
        kept = self.parts.get((branches, group.expert))
        if kept is None or not torch.equal(kept[0], group.rows_R):
            kept = self.parts[branches, group.expert] = group.rows_R, condition[group.rows_R]
        return kept[1]

    def _prior(self) -> Generator[list[Call], list[Tensor], Tensor]:
        """p(k | condition) over the available experts: from the table, or without one from the router at pure noise."""
        info = self.info
        if isinstance(self.strategy, Oracle):
            assert self.request.cluster_B is not None
            if info.available_K is not None and not info.available_K[self.request.cluster_B].all():
                raise SamplingError("strategy oracle: the expert of a wanted cluster isn't there")
            return F.one_hot(self.request.cluster_B, info.num_experts).to(info.dtype)
        branches = UNCONDITIONAL if self._scale(1.0) == 0 else CONDITIONAL
        condition = self._condition(branches)
        if isinstance(condition, Text) or info.prior_CK is None:
            # At t = 1 the posterior is p(k | condition). Its x isn't the image's noise, which k must not depend on.
            x_BCHW = initial_noise(self.request.seeds, info.image_shape, ROUTING).to(info.dtype)
            return (yield from self._posterior(Ask(x_BCHW, 1.0, new_step=True), branches))
        return available_prior(info.prior_CK, info.available_K)[condition]

    def _route(
        self, ask: Ask, branches: Branches
    ) -> Generator[list[Call], list[Tensor], tuple[Routing, Tensor | None]]:
        """The routing of all branches' rows here, and the images whose held experts have just changed."""
        before, num_experts = self.held, self.info.num_experts
        if self.strategy.when == "start":
            held = yield from self.start()
            return held.repeat(len(branches)), None
        # Exact guidance of the mixture needs each branch under its own posterior; all else takes the conditional's.
        exact = self.strategy.when == "velocity" and self.request.settings.guidance_kind == "mixture"
        routed = branches if exact else branches[:1]
        switched_B = None
        if before is None or ask.new_step or self.strategy.when == "velocity":
            probs_BK = yield from self._posterior(ask, routed)
            routing = self.held = self.strategy.route(probs_BK, before, self._uniforms())
            if self.strategy.when == "step" and before:
                switched_B = routing.differs(before, num_experts)
        elif before.experts_Bk.shape[1] == 1:
            routing = before
        else:
            # Within a step the experts stay, and are weighed where the solver asks.
            routing = self.strategy.reweigh(before, (yield from self._posterior(ask, routed)))
        return routing.repeat(len(branches) // len(routed)), switched_B

    def _posterior(self, ask: Ask, branches: Branches) -> Generator[list[Call], list[Tensor], Tensor]:
        call = RouterCall(*_rows(ask, len(branches)), self._condition(branches))
        self.num_router_rows += len(call.x_BCHW)
        (logits_RK,) = yield [call]
        if logits_RK.shape[1] != self.info.num_experts:
            raise ExpertCountError(
                f"the router speaks of {logits_RK.shape[1]} experts, the mixture has {self.info.num_experts}:"
                " load the router that was trained with these experts"
            )
        if logits_RK.isnan().any():
            raise NotFiniteError(f"the router gave NaN at t = {ask.t:.4g}: its weights or its input are broken")
        prior_K = None if self.info.prior_CK is None else self.info.prior_CK[-1]
        return posterior(self.calibration(logits_RK.to(ask.x_BCHW)), self.info.available_K, prior_K)

    def _mixed(self, ask: Ask, branches: Branches, routing: Routing) -> Generator[list[Call], list[Tensor], Tensor]:
        x_RCHW, t_R = _rows(ask, len(branches))
        groups = group_rows(routing)
        calls = [ExpertCall(g.expert, x_RCHW[g.rows_R], t_R[g.rows_R], self._condition_of(branches, g)) for g in groups]
        self.num_expert_rows += sum(len(call.x_BCHW) for call in calls)
        results = yield list[Call](calls)
        # Answers may come in another precision or from another device than the state's.
        velocities = [result.to(x_RCHW) for result in results]
        for call, velocity in zip(calls, velocities, strict=True):
            assert velocity.shape == call.x_BCHW.shape
            if not velocity.isfinite().all():
                raise NotFiniteError(f"expert {call.expert} gave a velocity that isn't finite at t = {ask.t:.4g}")
        return mix(groups, velocities, len(x_RCHW))


def _rows(ask: Ask, num_branches: int) -> tuple[Tensor, Tensor]:
    x_RCHW = ask.x_BCHW.repeat(num_branches, 1, 1, 1)
    return x_RCHW, x_RCHW.new_full((len(x_RCHW),), ask.t)
