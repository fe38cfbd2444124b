"""Trajectories in one process: each call is a call of a function.

Shapes: B rows, CHW image, K experts.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ddm_ray.config import SamplingSettings
from ddm_ray.core.condition import Condition
from ddm_ray.errors import ExpertCountError, SamplingError
from ddm_ray.sampling.plan import SamplingPlan
from ddm_ray.sampling.request import ExpertCall, MixtureInfo, NetworkCall, SampleRequest, SampleResult, validate
from ddm_ray.sampling.state import Trajectories, require_finite_result
from ddm_ray.sampling.trajectory import advance, at_other, begin_at, next_calls, start, turned

Field = Callable[[Tensor, Tensor, Any], Tensor]
"""(x_BCHW, t_B, condition) -> velocity_BCHW, or logits_BK for a router."""


class Experts(Protocol):
    """The experts of a mixture by number; None for one that isn't there."""

    def __len__(self) -> int: ...

    def __getitem__(self, expert: int, /) -> Field | None: ...


FULL = SamplingSettings(strategy="full")
OnStep = Callable[[int, float, Tensor], Tensor | None]
"""Called after each step with its number from 0, the t that it ended at, x_BCHW there on the networks' device.

Sampling goes on from the tensor that it returns, if it returns one.
"""
Interrupted = Callable[[], bool]
"""True, asked before each step, where no further step is to be made."""


def sample(
    request: SampleRequest,
    info: MixtureInfo,
    experts: Experts,
    router: Field | None = None,
    device: torch.device | str = "cpu",
    on_step: OnStep | None = None,
    interrupted: Interrupted | None = None,
) -> SampleResult:
    """Images by these experts; those that are None are left out and the mixture renormalises without them.

    The state stays on `device`, where the networks are. What is `interrupted` is as it was after its last step, and its
    routing 0 from there on. SamplingError for what can't be met, or if the router is needed and isn't there.
    """
    with torch.inference_mode():
        state = start(request, with_available(info, experts), device)
        return run(state, experts, router, on_step, interrupted).result()


def run(
    state: Trajectories,
    experts: Experts,
    router: Field | None = None,
    on_step: OnStep | None = None,
    interrupted: Interrupted | None = None,
) -> Trajectories:
    """Rows of one plan at the end of it, every call answered by a call of a function, in inference mode."""
    with torch.inference_mode():
        while not state.done_B.any():
            turn = state.turn
            assert turn is not None
            if interrupted and turn.planned["starts"][0] and interrupted():
                state.routing_BSK[:, int(turn.planned["step"][0]) :] = 0  # chosen, and not taken
                break
            state = advance(state, answers(next_calls(state), experts, router))
            if on_step and turn.chosen and turn.planned["ends"][0]:
                other_BCHW = on_step(int(turn.planned["step"][0]), float(turn.planned["until"][0]), state.x_BCHW)
                if other_BCHW is not None:
                    state = at_other(state, other_BCHW)
    return state


def answers(calls: Sequence[NetworkCall], experts: Experts, router: Field | None) -> list[Tensor]:
    """Answers of the networks to each call. SamplingError if a router or an expert that is called isn't there."""
    together: Callable[[Sequence[NetworkCall]], list[Tensor]] | None = getattr(experts, "together", None)
    if (
        together
        and len(calls) > 1
        and all(isinstance(call, ExpertCall) and experts[call.expert] is not None for call in calls)
    ):
        return together(calls)
    prefetch: Callable[[int], None] | None = getattr(experts, "prefetch", None)
    if prefetch is None:
        return [_answer(call, experts, router) for call in calls]
    numbers = [call.expert if isinstance(call, ExpertCall) else -1 for call in calls]
    here: Sequence[int] = getattr(experts, "here", ())
    # Experts that are there already come first, before others take their place.
    order = sorted(range(len(calls)), key=lambda call: numbers[call] not in here)
    results = dict[int, Tensor]()
    for call, following in zip(order, [*order[1:], None], strict=True):
        for soon in (call, following):
            # This one first: fetched after the next, it would be the next's turn to make room.
            if soon is not None and numbers[soon] >= 0:
                prefetch(numbers[soon])
        results[call] = _answer(calls[call], experts, router)
    return [results[call] for call in range(len(calls))]


def _answer(call: NetworkCall, experts: Experts, router: Field | None) -> Tensor:
    # No reference outlives the call: the expert may have to make room for the next.
    field = experts[call.expert] if isinstance(call, ExpertCall) else router
    if field is None:
        missing = f"expert {call.expert} is" if isinstance(call, ExpertCall) else "the router is"
        raise SamplingError(f"{missing} needed but not there: give it, or choose another strategy")
    return field(call.x_BCHW, call.t_B, call.condition)


def mixture_velocity(
    x_BCHW: Tensor,
    t: float,
    condition: Condition,
    info: MixtureInfo,
    experts: Experts,
    router: Field | None = None,
    device: torch.device | str = "cpu",
    *,
    settings: SamplingSettings = FULL,
    seeds: Sequence[int] | None = None,
    cluster_B: Tensor | None = None,
) -> Tensor:
    """The mixture's velocity at (x, t), t in [0, 1]: exact for exact networks by `full`, the default strategy.

    For strategies that draw, rows are images of the `seeds`, 0 to B - 1 if none are given. Raises SamplingError, and as
    `sample` does.
    """
    request = SampleRequest(tuple(range(len(x_BCHW)) if seeds is None else seeds), condition, settings, cluster_B)
    info = replace(with_available(info, experts), dtype=x_BCHW.dtype)
    validate(request, info)
    with torch.inference_mode():
        state = turned(begin_at(SamplingPlan.at(t, settings, info), x_BCHW, request, info, device))
        velocity_BCHW = run(state, experts, router).history[0]
        require_finite_result(velocity_BCHW)
        return velocity_BCHW.to(x_BCHW.device)


def drawn_experts(
    request: SampleRequest, info: MixtureInfo, router: Field | None = None, device: torch.device | str = "cpu"
) -> tuple[Tensor, int]:
    """Int64 (B,): the experts that a strategy which chooses at the start gives the request's images; router rows."""
    with torch.inference_mode():
        state = start(request, info, device)
        assert state.turn is not None
        num_router_rows = len(state.turn.routed_R)
        if num_router_rows:
            state = advance(state, answers(next_calls(state), (), router))
    assert state.turn is not None
    assert state.turn.chosen is not None
    held_BK = state.turn.chosen.held_BK
    assert ((held_BK > 0).sum(dim=1) == 1).all()
    return held_BK.argmax(dim=1), num_router_rows


def with_available(info: MixtureInfo, experts: Experts) -> MixtureInfo:
    """`info` without the experts that are None. ExpertCountError if there are not as many as it says."""
    if len(experts) != info.num_experts:
        raise ExpertCountError(f"{len(experts)} experts given for a mixture of {info.num_experts}: use None for a gap")
    present: Sequence[bool] = getattr(experts, "present", None) or [experts[k] is not None for k in range(len(experts))]
    available_K = torch.tensor(present)
    return info.with_available(available_K if info.available_K is None else available_K & info.available_K)
