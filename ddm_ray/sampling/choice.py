"""Choosing experts: what the router is asked, and what its answer makes of the next velocity of each row.

Shapes: see `state`; R rows of one call, G guided rows.
"""

from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ddm_ray.core.condition import Condition, Text
from ddm_ray.core.mixture import available_prior, group_rows
from ddm_ray.core.routing import Oracle, differs
from ddm_ray.core.streams import ROUTING
from ddm_ray.core.transfer import picked, upload
from ddm_ray.errors import ExpertCountError, NotFiniteError, SamplingError
from ddm_ray.sampling.noise import initial_noise, routing_uniforms
from ddm_ray.sampling.plan import AT_START, AT_VELOCITY, Rule, SamplingPlan, scale_at
from ddm_ray.sampling.request import MixtureInfo, RouterCall, SampleRequest
from ddm_ray.sampling.state import Layout, Trajectories, Turn

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


def router_call(state: Trajectories, turn: Turn) -> RouterCall:
    """The rows that ask, and after them again, without their condition, those of exact guidance."""
    x_BCHW, t_B = turn.point_BCHW, turn.t_B
    null_B = np.broadcast_to(turn.planned["scale"] == 0, len(state))
    if (starting_B := _starting(state, turn)).any():
        # At t = 1 the posterior is p(k | condition). Its x isn't the image's noise, which k must not depend on.
        rows = np.flatnonzero(starting_B)
        seeds = [int(seed) for seed in state.seed_B[rows]]
        noise = initial_noise(seeds, state.info.image_shape, ROUTING).to(x_BCHW)
        index = upload(rows, x_BCHW.device)
        x_BCHW, t_B = x_BCHW.index_copy(0, index, noise), t_B.index_fill(0, index, 1.0)
        null_at_noise_P = np.array([scale_at(plan.settings, 1.0) == 0 for plan in state.plans])
        null_B = np.where(starting_B, null_at_noise_P[state.plan_B], null_B)
    asks_R, twice_R = np.flatnonzero(turn.asks_B), _asking_twice(state, turn)
    entries_R = np.concatenate([asks_R, twice_R])
    condition = state.conditions(entries_R, np.concatenate([null_B[asks_R], np.ones(len(twice_R), bool)]))
    if len(asks_R) == len(state) and not len(twice_R):
        return RouterCall(x_BCHW, t_B, condition)
    index = upload(entries_R, x_BCHW.device)
    return RouterCall(x_BCHW[index], t_B[index], condition)


def routed(state: Trajectories, turn: Turn, logits_RK: Tensor | None) -> Trajectories:
    """The state with the experts of its next velocity, by what the router says of the rows that ask it."""
    planned, count = turn.planned, len(state)
    guided_B = np.broadcast_to(turn.guided, count)
    guided_G = np.flatnonzero(guided_B)
    restarts_B = np.broadcast_to(planned["jumps"] & planned["starts"], count)
    choice, router_rows_B = _Choice(state.weights_BK), state.router_rows_B
    if logits_RK is not None:
        _require_logits(state, turn, logits_RK)
        choice = _choice(state, turn, logits_RK.to(state.x_BCHW))
        router_rows_B = router_rows_B + turn.asks_B
        router_rows_B[_asking_twice(state, turn)] += 1
        before_BK = state.weights_BK
        switched_B = (differs(choice.held_BK, before_BK) & (before_BK > 0).any(dim=1)).numpy()
        restarts_B = restarts_B | (switched_B & planned["starts"])
    weights_BK = weights_EK = _placed(upload(choice.held_BK.numpy(), state.x_BCHW.device), choice.unread)
    if len(guided_G):
        twice = [(count + np.searchsorted(guided_G, rows), weights_RK) for rows, weights_RK in choice.unread_twice]
        weights_EK = _placed(torch.cat([weights_BK, picked(weights_BK, guided_G)]), twice)
    if weights_EK.is_cpu:
        used_EK = weights_EK.numpy() > 0
    else:
        used_BK = (choice.held_BK.numpy() > 0) | choice.used_BK
        used_EK = np.concatenate([used_BK, used_BK[guided_G]])
    _trace(state.routing_BSK, planned, weights_BK)
    return replace(
        state,
        weights_BK=choice.held_BK,
        router_rows_B=router_rows_B,
        turn=replace(turn, weights_EK=weights_EK, restarts_B=restarts_B),
        layout=_layout(state, guided_B, np.broadcast_to(planned["scale"] == 0, count), used_EK),
    )


@dataclass
class _Choice:
    """Weights that rows hold (CPU), and those of `full`, on the device and unread: nothing waits for them.

    `used_BK` (bool): experts that the latter may use. `unread_twice`: of the branch without condition.
    """

    held_BK: Tensor
    unread: list[Weights] = field(default_factory=list)
    unread_twice: list[Weights] = field(default_factory=list)
    used_BK: np.ndarray | bool = False


def _choice(state: Trajectories, turn: Turn, logits_RK: Tensor) -> _Choice:
    asks_R, twice_R = np.flatnonzero(turn.asks_B), _asking_twice(state, turn)
    choice = _Choice(state.weights_BK.clone(), used_BK=np.zeros((len(state), state.info.num_experts), bool))
    read_RK = logits_RK if (state.plans.when == AT_VELOCITY).all() else logits_RK.cpu()
    for rule, by_P in state.plans.rules:
        of_R = np.flatnonzero(by_P[state.plan_B[asks_R]])
        rows = asks_R[of_R]
        if not len(rows):
            continue
        if rule.strategy.when != "velocity":
            choice.held_BK[rows] = _chosen(state, turn, rule, rows, rule.posterior(picked(read_RK, of_R)))
            continue
        choice.used_BK[rows] = True if rule.available_K is None else rule.available_K.numpy()
        choice.unread.append((rows, _unread(rule, picked(logits_RK, of_R))))
        of_twice = np.flatnonzero(by_P[state.plan_B[twice_R]])
        if len(of_twice):
            weights_RK = _unread(rule, picked(logits_RK, len(asks_R) + of_twice))
            choice.unread_twice.append((twice_R[of_twice], weights_RK))
    return choice


def _unread(rule: Rule, logits_RK: Tensor) -> Tensor:
    probs_RK = rule.posterior(logits_RK)
    return rule.strategy.route(probs_RK, torch.zeros_like(probs_RK), None)


def _chosen(state: Trajectories, turn: Turn, rule: Rule, rows: np.ndarray, probs_RK: Tensor) -> Tensor:
    """Weights of rows of one rule: chosen anew where a step or a trajectory starts, else weighed anew."""
    starts_R = np.broadcast_to(turn.planned["starts"], len(state))[rows]
    before_RK = state.weights_BK[rows]
    if rule.strategy.when == "start":
        before_RK, starts_R = torch.zeros_like(before_RK), np.ones_like(starts_R)
    if not starts_R.any():
        return rule.strategy.reweigh(before_RK, probs_RK)
    uniforms_RK = None
    if rule.strategy.draws:
        steps = np.broadcast_to(turn.planned["step"], len(state))[rows].tolist()
        uniforms_RK = routing_uniforms([int(seed) for seed in state.seed_B[rows]], state.info.num_experts, steps)
    anew_RK = rule.strategy.route(probs_RK, before_RK, uniforms_RK)
    if starts_R.all():
        return anew_RK
    return torch.where(torch.from_numpy(starts_R)[:, None], anew_RK, rule.strategy.reweigh(before_RK, probs_RK))


def _layout(state: Trajectories, guided_B: np.ndarray, null_B: np.ndarray, used_EK: np.ndarray) -> Layout:
    """Who computes what; the one before, or what of it is the same still: conditions may be large."""
    old, device = state.layout, state.x_BCHW.device
    branches = old is not None and np.array_equal(old.guided_B, guided_B) and np.array_equal(old.null_B, null_B)
    if old is not None and branches and np.array_equal(old.used_EK, used_EK):
        return old
    guided_G = np.flatnonzero(guided_B)
    if old is not None and branches:
        condition_E, guided = old.condition_E, old.guided_G
    else:
        entries_E = np.concatenate([np.arange(len(state)), guided_G])
        condition_E = state.conditions(entries_E, np.concatenate([null_B, np.ones(len(guided_G), bool)]))
        guided = upload(guided_G, device) if len(guided_G) else None
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
    return Layout(guided_B, null_B, used_EK, condition_E, guided, groups, conditions, experts_B, single)


def _require_logits(state: Trajectories, turn: Turn, logits_RK: Tensor) -> None:
    if logits_RK.shape[1] != state.info.num_experts:
        raise ExpertCountError(
            f"the router speaks of {logits_RK.shape[1]} experts, the mixture has {state.info.num_experts}:"
            " load the router that was trained with these experts"
        )
    if logits_RK.is_cpu and logits_RK.isnan().any():
        t = float(turn.planned["t"][0])
        raise NotFiniteError(f"the router gave NaN at t = {t:.4g}: its weights or its input are broken")


def _starting(state: Trajectories, turn: Turn) -> np.ndarray:
    """Bool (B,): rows that ask the router for the one expert of their whole trajectory."""
    return turn.asks_B & (state.plans.when == AT_START)[state.plan_B]


def _asking_twice(state: Trajectories, turn: Turn) -> np.ndarray:
    """Numbers of the rows whose branches are mixed each under its own posterior."""
    return np.flatnonzero(turn.asks_B & state.plans.exact[state.plan_B] & turn.guided)


def _trace(routing_BSK: Tensor, planned: np.ndarray, weights_BK: Tensor) -> None:
    """Write down the weights of rows whose step starts."""
    if len(planned) == 1:
        if planned["starts"][0]:
            routing_BSK[:, planned["step"][0]] = weights_BK
    elif len(rows := np.flatnonzero(planned["starts"])):
        index, steps = (upload(part, routing_BSK.device) for part in (rows, planned["step"][rows]))
        routing_BSK[index, steps] = weights_BK[index]


def _placed(weights_EK: Tensor, parts: list[Weights]) -> Tensor:
    for rows, weights_RK in parts:
        if len(rows) == len(weights_EK):
            return weights_RK
        weights_EK = weights_EK.index_copy(0, upload(rows, weights_EK.device), weights_RK)
    return weights_EK
