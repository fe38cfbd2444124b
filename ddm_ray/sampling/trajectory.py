"""Steps of trajectories: which networks to call with what, and what their answers make of the state.

Sans-IO: the in-process driver and the server run this very code, one velocity of all rows at a time. `next_calls`
says the calls, `advance` takes their answers; first the router's where any row is routed, then the experts'. Both are
pure, so that a state may be kept, moved, split and joined between them. Shapes: see `state`; R rows of one call.
"""

import numpy as np
import torch
from torch import Tensor

from ddm_ray.core.flow import append_dims
from ddm_ray.core.guidance import guide
from ddm_ray.core.mixture import mix, place
from ddm_ray.core.solver_schedule import HISTORY, moved
from ddm_ray.core.transfer import each, spread, upload
from ddm_ray.errors import NotFiniteError
from ddm_ray.sampling.choice import choose_experts, chosen_beforehand, router_call
from ddm_ray.sampling.noise import initial_noise
from ddm_ray.sampling.plan import AT_START, AT_STEP, AT_VELOCITY, Plans, SamplingPlan, guided
from ddm_ray.sampling.request import ExpertCall, MixtureInfo, NetworkCall, SampleRequest, validate
from ddm_ray.sampling.state import Chosen, Layout, Trajectories, Turn


def start(request: SampleRequest, info: MixtureInfo, device: torch.device | str = "cpu") -> Trajectories:
    """The request's images as noise, at their first velocity. Raises as `start_as_noise` does."""
    return turned(start_as_noise(request, info, device))


def start_as_noise(request: SampleRequest, info: MixtureInfo, device: torch.device | str = "cpu") -> Trajectories:
    """The request's images as noise, on the device where the networks are. SamplingError if it can't be met."""
    validate(request, info)
    x_BCHW = request.noise_BCHW
    if x_BCHW is None:
        x_BCHW = initial_noise(request.seeds, info.image_shape)
    return begin_at(SamplingPlan.of(request.settings, info), x_BCHW, request, info, device)


def begin_at(
    plan: SamplingPlan, x_BCHW: Tensor, request: SampleRequest, info: MixtureInfo, device: torch.device | str
) -> Trajectories:
    """Images of a valid request at the start of a plan, from x_BCHW. SamplingError for an expert that isn't there."""
    count, num_steps = len(request.seeds), int(plan.velocities["step"][-1]) + 1
    x_BCHW = x_BCHW.to(device, info.dtype)
    plans = Plans([plan])
    return Trajectories(
        info=info,
        plans=plans,
        plan_B=np.zeros(count, np.int64),
        seed_B=np.array(request.seeds, np.uint64),
        position_B=np.zeros(count, np.int64),
        condition=request.condition.to(device),
        null=info.null(1).to(device) if request.settings.guidance_scale != 1 else None,
        x_BCHW=x_BCHW,
        usable_B=np.zeros(count, np.int64),
        history=(torch.zeros_like(x_BCHW),) * plans.history,
        weights_BK=chosen_beforehand(plan, request, info),
        routing_BSK=x_BCHW.new_zeros(count, num_steps, info.num_experts),
        expert_rows_B=np.zeros(count, np.int64),
        router_rows_B=np.zeros(count, np.int64),
    )


def next_calls(state: Trajectories) -> list[NetworkCall]:
    """The calls that `advance` takes answers to, in this order; no row may be done."""
    turn = state.turn
    assert turn is not None
    if turn.chosen is None:
        assert turn.router_call is not None
        return [turn.router_call]
    layout = turn.chosen.layout
    x_ECHW, t_E = turn.point_BCHW, turn.t_B
    if layout.guided_G is not None:
        every = len(layout.guided_G) == len(x_ECHW)
        x_ECHW, t_E = (torch.cat([part, part if every else part[layout.guided_G]]) for part in (x_ECHW, t_E))
    calls: list[NetworkCall] = []
    for group, condition in zip(layout.groups, layout.conditions, strict=True):
        if group.rows_R is None:
            calls.append(ExpertCall(group.expert, x_ECHW, t_E, condition))
        else:
            calls.append(ExpertCall(group.expert, x_ECHW[group.rows_R], t_E[group.rows_R], condition))
    return calls


def advance(state: Trajectories, answers: list[Tensor]) -> Trajectories:
    """The state after the answers to its `next_calls`. NotFiniteError, ExpertCountError for what isn't an answer."""
    turn = state.turn
    assert turn is not None
    if turn.chosen is None:
        (logits_RK,) = answers
        return choose_experts(state, turn, logits_RK)
    velocity_BCHW = _mixed(state, turn, turn.chosen, answers)
    restarts_B = turn.chosen.restarts_B
    usable_B = np.where(restarts_B, 0, state.usable_B) if restarts_B.any() else state.usable_B
    router_rows_B = state.router_rows_B
    if len(turn.routed_R):
        router_rows_B = router_rows_B.copy()
        router_rows_B[turn.routed_R] += 1
        router_rows_B[turn.twice_R] += 1
    after = state.changed(
        weights_BK=turn.chosen.held_BK,
        router_rows_B=router_rows_B,
        layout=turn.chosen.layout,
        x_BCHW=_carried(state, turn.planned, velocity_BCHW, usable_B),
        history=(velocity_BCHW, *state.history[:-1]),
        usable_B=np.minimum(usable_B + 1, HISTORY),
        position_B=state.position_B + 1,
        expert_rows_B=state.expert_rows_B + turn.chosen.layout.experts_B,
        turn=None,
    )
    return after if after.done_B.any() else turned(after)


def turned(state: Trajectories) -> Trajectories:
    """The state with its next velocity made out, and its experts too if the router need not be called for any row."""
    planned = state.planned()
    point_BCHW = _moved(state.x_BCHW, state.history, planned["lean"])
    held_B = (state.weights_BK.numpy() > 0).sum(axis=1)
    when_B = state.plans.when[state.plan_B]
    routed_B = (when_B == AT_VELOCITY) | ((when_B == AT_START) & (held_B == 0))
    # One expert has no weights to be told within a step.
    routed_B |= (when_B == AT_STEP) & (planned["starts"] | (held_B > 1))
    routed_R = np.flatnonzero(routed_B)
    if not len(routed_R):
        return choose_experts(state, Turn(planned, point_BCHW, routed_R, routed_R), None)
    twice_B = routed_B & state.plans.exact[state.plan_B] & guided(planned)
    turn = Turn(planned, point_BCHW, routed_R, np.flatnonzero(twice_B))
    call, condition = router_call(state, turn)
    return state.changed(turn=turn.changed(router_call=call), router_condition=condition)


def at_other(state: Trajectories, x_BCHW: Tensor) -> Trajectories:
    """The state, at the end of a step, with other images in place of its own: what is done stays, the rest follows."""
    after = state.changed(x_BCHW=x_BCHW, turn=None)
    return after if after.done_B.any() else turned(after)


def _carried(state: Trajectories, planned: np.ndarray, velocity_BCHW: Tensor, usable_B: np.ndarray) -> Tensor:
    """Images after this velocity: see `solver_schedule.VELOCITY`."""
    moves, x_BCHW = planned["moves"], state.x_BCHW
    if state.plans.draws:
        keep = each(planned["keep"], x_BCHW)
        x_BCHW = x_BCHW * (keep if isinstance(keep, float) else append_dims(keep, x_BCHW))
    rows = np.arange(len(moves)) if len(moves) > 1 else 0
    # Most often all rows are alike, and one of them says it for all.
    same = len(moves) == 1 and bool((usable_B == usable_B[0]).all())
    by_BN = moves[:, usable_B[0]] if same else moves[rows, usable_B]
    x_BCHW = _moved(x_BCHW, (velocity_BCHW, *state.history), by_BN)
    return _with_noise(state, planned, x_BCHW) if state.plans.draws else x_BCHW


def _with_noise(state: Trajectories, planned: np.ndarray, x_BCHW: Tensor) -> Tensor:
    noise_B = spread(planned["noise"], len(state))
    rows = np.flatnonzero(noise_B)
    if not len(rows):
        return x_BCHW
    drawn_RCHW = state.step_noise(rows, spread(planned["step"], len(state))[rows])
    noise_R = append_dims(upload(noise_B[rows], x_BCHW.device).to(x_BCHW), x_BCHW)
    return x_BCHW.index_add(0, upload(rows, x_BCHW.device), noise_R * drawn_RCHW)


def _moved(x_BCHW: Tensor, velocities: tuple[Tensor, ...], by_BN: np.ndarray) -> Tensor:
    return moved(x_BCHW, velocities, [each(by_BN[:, number], x_BCHW) for number in range(len(velocities))])


def _mixed(state: Trajectories, turn: Turn, chosen: Chosen, answers: list[Tensor]) -> Tensor:
    """The mixture's velocity of each row: its experts' in their proportions, then guided."""
    layout = chosen.layout
    # Answers may come in another precision or from another device than the state's.
    velocities = [answer.to(state.x_BCHW) for answer in answers]
    for group, velocity in zip(layout.groups, velocities, strict=True):
        num_rows = len(layout.used_EK) if group.rows_R is None else len(group.rows_R)
        assert velocity.shape == (num_rows, *state.info.image_shape), f"expert {group.expert}: {velocity.shape}"
    if layout.single:
        mixed_ECHW = place(layout.groups, velocities, len(layout.used_EK))
    else:
        mixed_ECHW = mix(layout.groups, velocities, chosen.weights_EK)
    # On a GPU nothing waits to look; `Trajectories.result` does.
    if mixed_ECHW.is_cpu and not mixed_ECHW.isfinite().all():
        _raise_not_finite(state, turn, layout, velocities)
    if layout.guided_G is None:
        return mixed_ECHW
    count, scale = len(state), turn.planned["scale"]
    if len(mixed_ECHW) == 2 * count:
        return guide(mixed_ECHW[:count], mixed_ECHW[count:], each(scale, mixed_ECHW))
    primary_BCHW, scale_G = mixed_ECHW[:count], each(spread(scale, count)[layout.guided_B], mixed_ECHW)
    guided_GCHW = guide(primary_BCHW[layout.guided_G], mixed_ECHW[count:], scale_G)
    return primary_BCHW.index_copy(0, layout.guided_G, guided_GCHW)


def _raise_not_finite(state: Trajectories, turn: Turn, layout: Layout, velocities: list[Tensor]) -> None:
    t_B = spread(turn.planned["t"], len(layout.guided_B))
    t_E = np.concatenate([t_B, t_B[layout.guided_B]])
    for group, velocity in zip(layout.groups, velocities, strict=True):
        broken_R = ~velocity.flatten(1).isfinite().all(dim=1)
        if broken_R.any():
            entries = broken_R if group.rows_R is None else group.rows_R[broken_R]
            t = float(t_E[entries.numpy()][0])
            number = state.info.clusters[group.expert]
            raise NotFiniteError(f"expert {number} gave a velocity that isn't finite at t = {t:.4g}")
