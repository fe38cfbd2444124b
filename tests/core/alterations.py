"""One-line faults of the product, as the functions that test_mutants.py puts in the place of the real ones.

Shapes: B rows, K experts, C conditions.
"""

from dataclasses import replace

import numpy as np
import torch

from ddm_ray.core import calibration, condition, flow, mixture, routing, solver_schedule, solvers, times
from ddm_ray.core.routing import Oracle, Sticky, TopK, keep, keep_top
from ddm_ray.sampling import batches, choice, noise, state
from ddm_ray.sampling import plan as plans
from tests.core import closed_forms

POSTERIOR, MIX, GROUPS, TIMES, PARSE, NOISE, UNIFORMS, JOIN = (
    mixture.posterior,
    mixture.mix,
    mixture.group_rows,
    state.Turn.t_B.func,
    routing.parse_strategy,
    noise.initial_noise,
    noise.routing_uniforms,
    condition.join,
)
FINITE_ROUTER, GAUSSIAN_ROUTER = closed_forms.FiniteData.router, closed_forms.GaussianMixture.router
STICKY, NUCLEUS, SAMPLE = routing.Sticky.route, routing.Nucleus.route, routing.SampleK.route
ROUTER_CALL, RULE, SCALE, CONDITIONS, SOLVED, PLAN = (
    choice.router_call,
    plans._rule,
    plans.scale_at,
    state.Trajectories.conditions,
    solver_schedule.schedule,
    plans.SamplingPlan.of,
)
STEP_NOISE = state.Trajectories.step_noise
GRID, JOINED, TEXT_ROWS = times.time_grid, batches.joined, condition.Text.__getitem__
FITTED = calibration.fit_temperature


def flow_reversed(data, noise, t_B):
    t = flow.append_dims(t_B, data)
    return t * data + (1 - t) * noise


def time_reversed(turn):
    return 1 - TIMES(turn)


def time_a_step_late(trajectories, turn):
    call, condition = ROUTER_CALL(trajectories, turn)
    return replace(call, t_B=(call.t_B - 0.02).clamp(min=0)), condition


def uniform_posterior(logits_BK, *available):
    return POSTERIOR(torch.zeros_like(logits_BK), *available)


def conditional_posterior_for_both(settings, info):
    """Every expert guided by itself, all under the conditional posterior."""
    return replace(RULE(settings, info), exact=False)


def top_without_renormalising(probs_BK, kept):
    sorted_BK, order_BK = torch.sort(probs_BK, dim=1, descending=True, stable=True)
    return torch.zeros_like(probs_BK).scatter(1, order_BK[:, :kept], sorted_BK[:, :kept])


def kept_without_renormalising(probs_BK, kept_BK):
    return probs_BK * kept_BK


def bottom(probs_BK, kept):
    order_BK = torch.sort(probs_BK, dim=1, stable=True).indices[:, :kept]
    return keep(probs_BK, torch.zeros_like(probs_BK).scatter(1, order_BK, 1.0))


def groups_shifted(used_BK, device):
    return [replace(g, expert=(g.expert + 1) % used_BK.shape[1]) for g in GROUPS(used_BK, device)]


def unweighted(groups, velocities, weights_BK):
    return MIX(groups, velocities, torch.ones_like(weights_BK))


def rows_of_others(groups, velocities, weights_BK):
    return MIX(groups, [velocity.roll(1, dims=0) for velocity in velocities], weights_BK)


def most_likely(prior_BK, uniforms_B):
    return keep_top(prior_BK, 1)


def draw_one_too_far(prior_BK, uniforms_B):
    cdf_BK = prior_BK.double().cumsum(dim=1)
    experts_B1 = (uniforms_B.double()[:, None] >= cdf_BK - prior_BK / 2).sum(dim=1, keepdim=True)
    return torch.zeros_like(prior_BK).scatter(1, experts_B1.clamp(max=prior_BK.shape[1] - 1), 1.0)


def uniforms_of_the_noise(seeds, num_experts, step):
    noise_B = NOISE(seeds, (1, 1, 2))[:, 0, 0, 0].double()
    return torch.special.ndtr(noise_B)[:, None].expand(len(seeds), num_experts)


def uniforms_of_the_first_step(seeds, num_experts, step):
    return UNIFORMS(seeds, num_experts, 0)


def uniforms_of_the_first_seed(seeds, num_experts, step):
    return UNIFORMS(seeds, num_experts, step)[:1].expand(len(seeds), num_experts)


def noise_of_the_image_in_any_case(seeds, shape, purpose=noise.NOISE):
    return NOISE(seeds, shape)


def rerouted_at_every_velocity(name, num_experts):
    strategy = PARSE(name, num_experts)
    object.__setattr__(strategy, "when", "velocity")
    return strategy


def full_held_within_a_step(name, num_experts):
    strategy = PARSE(name, num_experts)
    object.__setattr__(strategy, "when", "step")
    object.__setattr__(strategy, "reweigh", lambda held, probs_BK: held)
    return strategy


def teacher_by_argmax(name, num_experts):
    strategy = PARSE(name, num_experts)
    return TopK(1) if isinstance(strategy, Oracle) else strategy


def oracle_of_the_next_cluster(self, probs_BK, before_BK, uniforms_BK):
    return keep_top(probs_BK.roll(1, dims=1), 1)


def sticky_without_margin(self, probs_BK, before_BK, uniforms_BK):
    return keep_top(probs_BK, 1)


def sticky_reversed(self, probs_BK, before_BK, uniforms_BK):
    return STICKY(Sticky(-self.margin), probs_BK, before_BK, uniforms_BK)


def sticky_for_ever(self, probs_BK, before_BK, uniforms_BK):
    return torch.where((before_BK > 0).any(dim=1, keepdim=True), before_BK, keep_top(probs_BK, 1))


def threshold_without_floor(self, probs_BK, before_BK, uniforms_BK):
    return keep(probs_BK, probs_BK >= self.least)


def threshold_of_the_likeliest(self, probs_BK, before_BK, uniforms_BK):
    return keep(probs_BK, probs_BK >= self.least * probs_BK.amax(dim=1, keepdim=True))


def threshold_or_two(self, probs_BK, before_BK, uniforms_BK):
    return keep(probs_BK, probs_BK >= probs_BK.topk(2, dim=1).values[:, 1:].clamp(max=self.least))


def nucleus_at(probs_BK, kept_of):
    sorted_BK, order_BK = torch.sort(probs_BK, dim=1, descending=True, stable=True)
    kept_BK = kept_of(sorted_BK)
    kept_BK[:, 0] = True
    return keep(probs_BK, torch.zeros_like(kept_BK).scatter(1, order_BK, kept_BK))


def nucleus_without_the_crossing_expert(self, probs_BK, before_BK, uniforms_BK):
    return nucleus_at(probs_BK, lambda sorted_BK: sorted_BK.cumsum(dim=1) <= self.mass)


def nucleus_one_too_many(self, probs_BK, before_BK, uniforms_BK):
    def kept_of(sorted_BK):
        return sorted_BK.cumsum(dim=1) - sorted_BK - sorted_BK.roll(1, dims=1) < self.mass

    return nucleus_at(probs_BK, kept_of)


def nucleus_temperature_inverted(self, probs_BK, before_BK, uniforms_BK):
    return NUCLEUS(routing.Nucleus(self.mass, 1 / self.temperature), probs_BK, before_BK, uniforms_BK)


def nucleus_temperature_of_choice_alone(self, probs_BK, before_BK, uniforms_BK):
    chosen = NUCLEUS(self, probs_BK, before_BK, uniforms_BK)
    return keep(probs_BK, chosen > 0)


def sample_with_replacement(self, probs_BK, before_BK, uniforms_BK):
    return keep(probs_BK, sum(routing.draw_expert(probs_BK, uniforms_BK[:, i]) for i in range(self.drawn)))


def sample_without_renormalising(self, probs_BK, before_BK, uniforms_BK):
    return probs_BK * (SAMPLE(self, probs_BK, before_BK, uniforms_BK) > 0)


def sample_weighed_alike(self, probs_BK, before_BK, uniforms_BK):
    return (SAMPLE(self, probs_BK, before_BK, uniforms_BK) > 0).to(probs_BK) / self.drawn


def sample_uniformly(self, probs_BK, before_BK, uniforms_BK):
    return keep(probs_BK, uniforms_BK >= uniforms_BK.topk(self.drawn, dim=1).values[:, -1:])


def interval_ignored(settings, t):
    return SCALE(settings.changed(guidance_interval=(0.0, 1.0)), t)


def interval_reversed(settings, t):
    low, high = settings.guidance_interval
    return SCALE(settings.changed(guidance_interval=(1 - high + 0.01, 1 - low)), t)


def interval_inside_out(settings, t):
    low, high = settings.guidance_interval
    return 1.0 if low <= t <= high else 3.0


def guidance_kinds_swapped(settings, info):
    kind = "mixture" if settings.guidance_kind == "per-expert" else "per-expert"
    return RULE(settings.changed(guidance_kind=kind), info)


def branches_swapped(self, rows, null):
    return CONDITIONS(self, rows, ~null if null.any() else null)


def null_dropped(self, rows, null):
    return CONDITIONS(self, rows, np.zeros_like(null))


def conditions_misaligned(self, rows, null):
    """Conditions interleaved by image, x stacked by branch."""
    order = np.argsort(rows, kind="stable")
    return CONDITIONS(self, rows[order], null[order])


def conditions_rolled(self, rows, null):
    return CONDITIONS(self, np.roll(rows, 1), np.roll(null, 1))


def text_mask_misaligned(self, rows):
    actual = TEXT_ROWS(self, rows)
    return replace(actual, mask_BL=actual.mask_BL.flip(0))


def clusters_left_behind(self, rows):
    index = torch.arange(len(self.seeds))[rows]
    seeds = tuple(self.seeds[row] for row in index.tolist())
    cluster_B = None if self.cluster_B is None else self.cluster_B[: len(index)]
    return replace(self, seeds=seeds, condition=self.condition[index], cluster_B=cluster_B)


def parts_in_their_own_order(parts, order=None):
    return JOINED(parts)


def numbered_from_one(settings, info):
    plan = PLAN(settings, info)
    velocities = plan.velocities.copy()  # those of all plans with these settings
    velocities["step"] += 1
    return replace(plan, velocities=velocities)


def last_not_reported(solver, times):
    planned = SOLVED(solver, times)
    planned["ends"] &= planned["until"] > 0
    return planned


def noise_of_one_step(trajectories, rows, step_R):
    return STEP_NOISE(trajectories, rows, np.zeros_like(step_R))


def history_of_guidance_kept(settings, info):
    plan = PLAN(settings, info)
    velocities = plan.velocities.copy()
    velocities["jumps"] = False
    return replace(plan, velocities=velocities)


LATE_STAGES = (solvers.Stage(at=1), solvers.Stage(at=1, lean=(1.0,), moves=((1 / 2, 1 / 2),)))
EVALUATED_A_STEP_LATE = solvers.Solver(2, 2, 1, lambda step: LATE_STAGES)
AB2_FOR_EQUAL_STEPS = solvers.Solver(2, 1, 1, lambda step: (solvers.Stage(moves=((1.0,), (1.5, -0.5))),))
AB3_FOR_EQUAL_STEPS = solvers.Solver(
    3, 1, 2, lambda step: (solvers.Stage(moves=((1.0,), (1.5, -0.5), (23 / 12, -16 / 12, 5 / 12))),)
)


def finite_router_fed_reversed_time(self, x, t, label):
    return FINITE_ROUTER(self, x, 1 - t, label)


def finite_router_blind_to_labels(self, x, t, label):
    return FINITE_ROUTER(self, x, t, torch.full_like(label, self.num_classes))


def router_without_prior(self, x, t, label):
    return GAUSSIAN_ROUTER(self, x, t, label) - self.prior_CK[label].log()


def router_fed_reversed_time(self, x, t, label):
    return GAUSSIAN_ROUTER(self, x, 1 - t, label)
