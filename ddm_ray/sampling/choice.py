"""Choosing experts: how the router is called, and what its answer makes of the next velocity of each row.

Shapes: see `state`; G guided rows.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ddm_ray.core.condition import Condition, Text
from ddm_ray.core.mixture import available_prior, group_rows
from ddm_ray.core.routing import Oracle, differs
from ddm_ray.core.streams import ROUTING
from ddm_ray.core.transfer import picked, spread, upload
from ddm_ray.errors import ExpertCountError, NotFiniteError, SamplingError
from ddm_ray.sampling.noise import initial_noise, routing_uniforms
from ddm_ray.sampling.plan import AT_START, AT_VELOCITY, Rule, SamplingPlan, guided, scale_at
from ddm_ray.sampling.request import MixtureInfo, RouterCall, SampleRequest
from ddm_ray.sampling.state import Chosen, Layout, RouterCondition, Trajectories, Turn

Weights = tuple[np.ndarray, Tensor]
"""Numbers of rows, and the weights of their experts on the device."""


def chosen_beforehand(plan: SamplingPlan, request: SampleRequest, info: MixtureInfo) -> Tensor:
    """Weights (B, K) that need no network: of a wanted cluster, or drawn by p(k | label); else 0."""
    count, strategy = len(request.seeds), plan.rule.strategy
    none_BK = torch.zeros(count, info.num_experts, dtype=info.dtype)
    if isinstance(strategy, Oracle):
        assert request.cluster_B is not None
        if info.available_K is not None and not info.available_K[request.cluster_B].all():
            raise SamplingError("strategy oracle: the expert of a wanted cluster isn't there")
        probs_BK = F.one_hot(request.cluster_B, info.num_experts)
    elif strategy.when != "start" or isinstance(request.condition, Text) or info.prior_CK is None:
        return none_BK
    else:
        label_B = info.null(count) if scale_at(request.settings, 1.0) == 0 else request.condition
        assert isinstance(label_B, Tensor)
        probs_BK = available_prior(info.prior_CK, info.available_K)[label_B]
    uniforms_BK = routing_uniforms(request.seeds, info.num_experts, 0) if strategy.draws else None
    return strategy.route(probs_BK.to(info.dtype), none_BK, uniforms_BK)


def router_call(state: Trajectories, turn: Turn) -> tuple[RouterCall, RouterCondition]:
    """The router's call: rows that are routed, and after them those of exact guidance again, without condition."""
    x_BCHW, t_B, routed_R, twice_R = turn.point_BCHW, turn.t_B, turn.routed_R, turn.twice_R
    null_B = spread(turn.planned["scale"] == 0, len(state))
    starting = routed_R[(state.plans.when == AT_START)[state.plan_B[routed_R]]]
    if len(starting):
        # At t = 1 the posterior is p(k | condition). Its x isn't the image's noise, which k must not depend on.
        seeds = [int(seed) for seed in state.seed_B[starting]]
        noise = initial_noise(seeds, state.info.image_shape, ROUTING).to(x_BCHW)
        index = upload(starting, x_BCHW.device)
        x_BCHW, t_B = x_BCHW.index_copy(0, index, noise), t_B.index_fill(0, index, 1.0)
        null_at_noise_P = np.array([scale_at(plan.settings, 1.0) == 0 for plan in state.plans])
        null_B = null_B.copy()
        null_B[starting] = null_at_noise_P[state.plan_B[starting]]
    entries_R, null_R = routed_R, null_B[routed_R]
    if len(twice_R):
        entries_R = np.concatenate([routed_R, twice_R])
        null_R = np.concatenate([null_R, np.ones(len(twice_R), bool)])
    kept = state.router_condition
    if kept is None or not (np.array_equal(kept.entries_R, entries_R) and np.array_equal(kept.null_R, null_R)):
        kept = RouterCondition(entries_R, null_R, state.conditions(entries_R, null_R))
    if len(entries_R) == len(routed_R) == len(state):
        return RouterCall(x_BCHW, t_B, kept.condition_R), kept
    index = upload(entries_R, x_BCHW.device)
    return RouterCall(x_BCHW[index], t_B[index], kept.condition_R), kept


def choose_experts(state: Trajectories, turn: Turn, logits_RK: Tensor | None) -> Trajectories:
    """The state with the experts of its turn, by what the router says of the rows that are routed.

    ExpertCountError for a router of another mixture, NotFiniteError for one that gives no numbers (on a CPU).
    """
    planned, count = turn.planned, len(state)
    guided_B = spread(guided(planned), count)
    guided_G = np.flatnonzero(guided_B)
    restarts_B = spread(planned["jumps"] & planned["starts"], count)
    held_BK, before_BK, on_device = state.weights_BK, state.weights_BK, _OnDevice()
    if logits_RK is not None:
        _require_logits(state, turn, logits_RK)
        held_BK, on_device = _weighed(state, turn, logits_RK.to(state.x_BCHW))
        switched_B = differs(held_BK, before_BK) & (before_BK.numpy() > 0).any(axis=1)
        restarts_B = restarts_B | (switched_B & planned["starts"])
    weights_BK = weights_EK = _placed(upload(held_BK.numpy(), state.x_BCHW.device), on_device.weights)
    if len(guided_G):
        twice = [(np.searchsorted(guided_G, rows), weights_RK) for rows, weights_RK in on_device.twice]
        weights_EK = torch.cat([weights_BK, _placed(picked(weights_BK, guided_G), twice)])
    if weights_EK.is_cpu:
        used_EK = weights_EK.numpy() > 0
    else:
        used_BK = (held_BK.numpy() > 0) | on_device.used_BK
        used_EK = np.concatenate([used_BK, used_BK[guided_G]])
    _trace(state.routing_BSK, planned, weights_BK)
    layout = _layout(state, guided_B, spread(planned["scale"] == 0, count), used_EK)
    return state.changed(turn=turn.changed(chosen=Chosen(held_BK, weights_EK, restarts_B, layout)))


@dataclass
class _OnDevice:
    """Weights of rows of `full`, on the device: nothing waits for them.

    `twice`: those of the branch without condition. `used_BK` (bool): experts that they may be of.
    """

    weights: list[Weights] = field(default_factory=list)
    twice: list[Weights] = field(default_factory=list)
    used_BK: np.ndarray | bool = False


def _weighed(state: Trajectories, turn: Turn, logits_RK: Tensor) -> tuple[Tensor, _OnDevice]:
    """Weights (B, K) that rows hold after the router's answer (CPU), and those that stay on the device."""
    routed_R, twice_R = turn.routed_R, turn.twice_R
    held_BK, on_device = state.weights_BK, _OnDevice()
    read_RK = logits_RK
    if not (state.plans.when == AT_VELOCITY)[state.plan_B[routed_R]].all():
        read_RK = logits_RK.cpu()
    for rule, by_P in state.plans.rules:
        of_R = np.arange(len(routed_R)) if by_P.all() else np.flatnonzero(by_P[state.plan_B[routed_R]])
        rows = routed_R[of_R]
        if not len(rows):
            continue
        if rule.strategy.when != "velocity":
            weights_RK = _chosen(state, turn, rule, rows, rule.posterior(picked(read_RK, of_R)))
            held_BK = _placed(held_BK, [(rows, weights_RK)])
            continue
        used_BK = np.zeros((len(state), state.info.num_experts), bool)
        used_BK[rows] = True if rule.available_K is None else rule.available_K.numpy()
        on_device.used_BK = on_device.used_BK | used_BK
        of_twice = np.flatnonzero(by_P[state.plan_B[twice_R]]) if len(twice_R) else twice_R
        of_both = np.concatenate([of_R, len(routed_R) + of_twice]) if len(of_twice) else of_R
        probs_RK = rule.posterior(picked(logits_RK, of_both))
        weights_RK = rule.strategy.route(probs_RK, torch.zeros_like(probs_RK), None)
        on_device.weights.append((rows, weights_RK[: len(rows)]))
        if len(of_twice):
            on_device.twice.append((twice_R[of_twice], weights_RK[len(rows) :]))
    return held_BK, on_device


def _chosen(state: Trajectories, turn: Turn, rule: Rule, rows: np.ndarray, probs_RK: Tensor) -> Tensor:
    """Weights of rows of one rule: chosen again where a step or a trajectory starts, else weighed again."""
    starts_R = spread(turn.planned["starts"], len(state))[rows]
    before_RK = picked(state.weights_BK, rows)
    if rule.strategy.when == "start":
        before_RK, starts_R = torch.zeros_like(before_RK), np.ones_like(starts_R)
    if not starts_R.any():
        return rule.strategy.reweigh(before_RK, probs_RK)
    uniforms_RK = None
    if rule.strategy.draws:
        steps = spread(turn.planned["step"], len(state))[rows].tolist()
        uniforms_RK = routing_uniforms([int(seed) for seed in state.seed_B[rows]], state.info.num_experts, steps)
    anew_RK = rule.strategy.route(probs_RK, before_RK, uniforms_RK)
    if starts_R.all():
        return anew_RK
    return torch.where(torch.from_numpy(starts_R)[:, None], anew_RK, rule.strategy.reweigh(before_RK, probs_RK))


def _layout(state: Trajectories, guided_B: np.ndarray, null_B: np.ndarray, used_EK: np.ndarray) -> Layout:
    """The layout of these entries; the one before, or parts of it, where they are the same: conditions may be large."""
    old, device = state.layout, state.x_BCHW.device
    branches = old is not None and bool(((old.guided_B == guided_B) & (old.null_B == null_B)).all())
    if old is not None and branches and (old.used_EK == used_EK).all():
        return old
    guided_G = np.flatnonzero(guided_B)
    if old is not None and branches:
        condition_E, index_G = old.condition_E, old.guided_G
    else:
        entries_E = np.concatenate([np.arange(len(state)), guided_G])
        condition_E = state.conditions(entries_E, np.concatenate([null_B, np.ones(len(guided_G), bool)]))
        index_G = upload(guided_G, device) if len(guided_G) else None
    groups, conditions = group_rows(used_EK, device), list[Condition]()
    kept = {}
    if old is not None and branches:
        same_K = (old.used_EK == used_EK).all(axis=0)
        kept = {g.expert: c for g, c in zip(old.groups, old.conditions, strict=True) if same_K[g.expert]}
    for group in groups:
        if group.rows_R is None:
            conditions.append(condition_E)
        else:
            conditions.append(kept[group.expert] if group.expert in kept else condition_E[group.rows_R])
    experts_E = used_EK.sum(axis=1)
    experts_B = experts_E[: len(state)].copy()
    experts_B[guided_G] += experts_E[len(state) :]
    single = bool((experts_E == 1).all())
    return Layout(guided_B, null_B, used_EK, condition_E, index_G, groups, conditions, experts_B, single)


def _require_logits(state: Trajectories, turn: Turn, logits_RK: Tensor) -> None:
    assert len(logits_RK) == len(turn.routed_R) + len(turn.twice_R)
    if logits_RK.shape[1] != state.info.num_experts:
        raise ExpertCountError(
            f"the router speaks of {logits_RK.shape[1]} experts, the mixture has {state.info.num_experts}:"
            " load the router that was trained with these experts"
        )
    if logits_RK.is_cpu and logits_RK.isnan().any():
        t = float(turn.planned["t"][0])
        raise NotFiniteError(f"the router gave NaN at t = {t:.4g}: its weights or its input are broken")


def _trace(routing_BSK: Tensor, planned: np.ndarray, weights_BK: Tensor) -> None:
    """Write down the weights of rows where a step starts."""
    if len(planned) == 1:
        if planned["starts"][0]:
            routing_BSK[:, planned["step"][0]] = weights_BK
    elif len(rows := np.flatnonzero(planned["starts"])):
        index = upload(rows * routing_BSK.shape[1] + planned["step"][rows], routing_BSK.device)
        routing_BSK.view(-1, routing_BSK.shape[2]).index_copy_(0, index, picked(weights_BK, rows))


def _placed(weights_EK: Tensor, parts: list[Weights]) -> Tensor:
    for rows, weights_RK in parts:
        if len(rows) == len(weights_EK):
            return weights_RK
        weights_EK = weights_EK.index_copy(0, upload(rows, weights_EK.device), weights_RK)
    return weights_EK
