"""One-line faults of the product, as the functions that test_mutants.py puts in the place of the real ones.

Shapes: B rows, K experts, C conditions.
"""

from dataclasses import replace

import torch

from ddm_ray.core import calibration, condition, flow, mixture, routing, solvers, times
from ddm_ray.core.routing import Oracle, Routing, Sticky, TopK, keep, keep_top
from ddm_ray.sampling import batches, trajectory
from tests.core import closed_forms

Trajectories = trajectory.Trajectories
POSTERIOR, MIX, GROUPS, ROWS, PARSE, NOISE, UNIFORMS, JOIN = (
    mixture.posterior,
    mixture.mix,
    mixture.group_rows,
    trajectory._rows,
    routing.parse_strategy,
    trajectory.initial_noise,
    trajectory.routing_uniforms,
    condition.join,
)
FINITE_ROUTER, GAUSSIAN_ROUTER = closed_forms.FiniteData.router, closed_forms.GaussianMixture.router
STICKY, NUCLEUS, SAMPLE = routing.Sticky.route, routing.Nucleus.route, routing.SampleK.route
ROUTED, ROUTE, SCALE, RUN = Trajectories._posterior, Trajectories._route, Trajectories._scale, Trajectories.run
CONDITION = Trajectories._condition
GRID, JOINED, TEXT_ROWS = times.time_grid, batches.joined, condition.Text.__getitem__
CALIBRATION, RATIO, FITTED = calibration.Calibration.__call__, calibration.prior_ratio, calibration.fit_temperature


def flow_reversed(data, noise, t_B):
    t = flow.append_dims(t_B, data)
    return t * data + (1 - t) * noise


def time_reversed(ask, num_branches):
    x, t = ROWS(ask, num_branches)
    return x, 1 - t


def time_a_step_late(self, ask, branches):
    return ROUTED(self, replace(ask, t=max(ask.t - 0.02, 0.0)), branches)


def uniform_posterior(logits_BK, *available):
    return POSTERIOR(torch.zeros_like(logits_BK), *available)


def conditional_posterior_for_both(logits_BK, *available):
    """Every expert guided by itself, all under the conditional posterior."""
    probs_BK = POSTERIOR(logits_BK, *available)
    half = len(probs_BK) // 2
    return torch.cat([probs_BK[:half], probs_BK[:half]])


def top_without_renormalising(probs_BK, kept):
    sorted_BK, order_BK = torch.sort(probs_BK, dim=1, descending=True, stable=True)
    return Routing(order_BK[:, :kept], sorted_BK[:, :kept])


def kept_without_renormalising(probs_BK, kept_BK):
    return Routing(torch.arange(probs_BK.shape[1]).expand_as(probs_BK), probs_BK * kept_BK)


def bottom(probs_BK, kept):
    order_BK = torch.sort(probs_BK, dim=1, stable=True).indices[:, :kept]
    weights_Bk = probs_BK.gather(1, order_BK)
    return Routing(order_BK, weights_Bk / weights_Bk.sum(dim=1, keepdim=True))


def groups_shifted(chosen):
    groups = GROUPS(chosen)
    return [replace(g, expert=(g.expert + 1) % (int(chosen.experts_Bk.max()) + 1)) for g in groups]


def groups_unweighted(chosen):
    return [replace(g, weights_R=torch.ones_like(g.weights_R)) for g in GROUPS(chosen)]


def rows_of_others(groups, velocities, num_rows):
    return MIX(groups, [velocity.roll(1, dims=0) for velocity in velocities], num_rows)


def most_likely(prior_BK, uniforms_B):
    return keep_top(prior_BK, 1)


def draw_one_too_far(prior_BK, uniforms_B):
    cdf_BK = prior_BK.double().cumsum(dim=1)
    experts_B1 = (uniforms_B.double()[:, None] >= cdf_BK - prior_BK / 2).sum(dim=1, keepdim=True)
    experts_B1 = experts_B1.clamp(max=prior_BK.shape[1] - 1)
    return Routing(experts_B1, torch.ones_like(experts_B1, dtype=prior_BK.dtype))


def uniforms_of_the_noise(seeds, num_experts, step):
    noise_B = NOISE(seeds, (1, 1, 2))[:, 0, 0, 0].double()
    return torch.special.ndtr(noise_B)[:, None].expand(len(seeds), num_experts)


def uniforms_of_the_first_step(seeds, num_experts, step):
    return UNIFORMS(seeds, num_experts, 0)


def uniforms_of_the_first_seed(seeds, num_experts, step):
    return UNIFORMS(seeds, num_experts, step)[:1].expand(len(seeds), num_experts)


def noise_of_the_image_in_any_case(seeds, shape, purpose=trajectory.NOISE):
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


def oracle_of_the_next_cluster(self, probs_BK, before, uniforms_BK):
    return keep_top(probs_BK.roll(1, dims=1), 1)


def sticky_without_margin(self, probs_BK, before, uniforms_BK):
    return keep_top(probs_BK, 1)


def sticky_reversed(self, probs_BK, before, uniforms_BK):
    return STICKY(Sticky(-self.margin), probs_BK, before, uniforms_BK)


def sticky_for_ever(self, probs_BK, before, uniforms_BK):
    return before or keep_top(probs_BK, 1)


def threshold_without_floor(self, probs_BK, before, uniforms_BK):
    return keep(probs_BK, probs_BK >= self.least)


def threshold_of_the_likeliest(self, probs_BK, before, uniforms_BK):
    return keep(probs_BK, probs_BK >= self.least * probs_BK.amax(dim=1, keepdim=True))


def threshold_or_two(self, probs_BK, before, uniforms_BK):
    return keep(probs_BK, probs_BK >= probs_BK.topk(2, dim=1).values[:, 1:].clamp(max=self.least))


def nucleus_at(probs_BK, kept_of):
    sorted_BK, order_BK = torch.sort(probs_BK, dim=1, descending=True, stable=True)
    kept_BK = kept_of(sorted_BK)
    kept_BK[:, 0] = True
    return keep(probs_BK, torch.zeros_like(kept_BK).scatter(1, order_BK, kept_BK))


def nucleus_without_the_crossing_expert(self, probs_BK, before, uniforms_BK):
    return nucleus_at(probs_BK, lambda sorted_BK: sorted_BK.cumsum(dim=1) <= self.mass)


def nucleus_one_too_many(self, probs_BK, before, uniforms_BK):
    def kept_of(sorted_BK):
        return sorted_BK.cumsum(dim=1) - sorted_BK - sorted_BK.roll(1, dims=1) < self.mass

    return nucleus_at(probs_BK, kept_of)


def nucleus_temperature_inverted(self, probs_BK, before, uniforms_BK):
    return NUCLEUS(routing.Nucleus(self.mass, 1 / self.temperature), probs_BK, before, uniforms_BK)


def nucleus_temperature_of_choice_alone(self, probs_BK, before, uniforms_BK):
    chosen = NUCLEUS(self, probs_BK, before, uniforms_BK)
    return keep(probs_BK, chosen.weights_Bk > 0)


def sample_with_replacement(self, probs_BK, before, uniforms_BK):
    drawn = [routing.draw(probs_BK, uniforms_BK[:, i]).experts_Bk for i in range(self.drawn)]
    chosen_Bk = torch.cat(drawn, dim=1)
    weights_Bk = probs_BK.gather(1, chosen_Bk)
    return Routing(chosen_Bk, weights_Bk / weights_Bk.sum(dim=1, keepdim=True))


def sample_without_renormalising(self, probs_BK, before, uniforms_BK):
    chosen_Bk = SAMPLE(self, probs_BK, before, uniforms_BK).experts_Bk
    return Routing(chosen_Bk, probs_BK.gather(1, chosen_Bk))


def sample_weighed_alike(self, probs_BK, before, uniforms_BK):
    chosen_Bk = SAMPLE(self, probs_BK, before, uniforms_BK).experts_Bk
    return Routing(chosen_Bk, torch.full(chosen_Bk.shape, 1 / self.drawn, dtype=probs_BK.dtype))


def sample_uniformly(self, probs_BK, before, uniforms_BK):
    chosen_Bk = uniforms_BK.topk(self.drawn, dim=1).indices
    weights_Bk = probs_BK.gather(1, chosen_Bk)
    return Routing(chosen_Bk, weights_Bk / weights_Bk.sum(dim=1, keepdim=True))


def temperature_multiplied(self, logits_NK):
    return CALIBRATION(replace(self, temperature=1 / self.temperature), logits_NK)


def ratio_before_temperature(self, logits_NK):
    shifted = logits_NK if self.log_ratio_K is None else logits_NK + self.log_ratio_K
    return shifted / self.temperature


def interval_ignored(self, t):
    return SCALE(_with(self, guidance_interval=(0.0, 1.0)), t)


def interval_reversed(self, t):
    low, high = self.request.settings.guidance_interval
    return SCALE(_with(self, guidance_interval=(1 - high + 0.01, 1 - low)), t)


def interval_inside_out(self, t):
    low, high = self.request.settings.guidance_interval
    return SCALE(_with(self, guidance_interval=(0.0, 1.0), guidance_scale=1.0 if low <= t <= high else 3.0), t)


def _with(state, **fields):
    other = object.__new__(Trajectories)
    other.__dict__.update(state.__dict__, request=state.request.changed(**fields))
    return other


def guidance_kinds_swapped(self, ask, branches):
    kind = "mixture" if self.request.settings.guidance_kind == "per-expert" else "per-expert"
    self.request = self.request.changed(guidance_kind=kind)
    return (yield from ROUTE(self, ask, branches))


def branches_swapped(self, branches):
    return CONDITION(self, branches[::-1])


def null_dropped(self, branches):
    return CONDITION(self, (True,) * len(branches))


def conditions_misaligned(self, branches):
    """Conditions interleaved by image, x stacked by branch."""
    given = CONDITION(self, branches)
    return given[torch.arange(len(given)).view(len(branches), -1).T.flatten()]


def conditions_rolled(self, branches):
    given = CONDITION(self, branches)
    return given[torch.arange(len(given)).roll(1)]


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


def numbered_from_one(self, on_step):
    return RUN(self, lambda number, t, x_BCHW: on_step(number + 1, t, x_BCHW))


def last_not_reported(self, on_step):
    return RUN(self, lambda number, t, x_BCHW: on_step(number, t, x_BCHW) if t else None)


def evaluated_a_step_late(x_BCHW, grid):
    for t, t_next in solvers._steps(grid):
        velocity = (yield solvers.Ask(x_BCHW, t_next, True)).velocity_BCHW
        late = (yield solvers.Ask(x_BCHW + (t_next - t) * velocity, t_next, False)).velocity_BCHW
        x_BCHW = x_BCHW + (t_next - t) * (velocity + late) / 2
    return x_BCHW


def ab2_for_equal_steps(x_BCHW, grid):
    previous = None
    for t, t_next in solvers._steps(grid):
        velocity = (yield solvers.Ask(x_BCHW, t, True)).velocity_BCHW
        previous = velocity if previous is None else previous
        x_BCHW = x_BCHW + (t_next - t) * (1.5 * velocity - 0.5 * previous)
        previous = velocity
    return x_BCHW


def finite_router_fed_reversed_time(self, x, t, label):
    return FINITE_ROUTER(self, x, 1 - t, label)


def finite_router_blind_to_labels(self, x, t, label):
    return FINITE_ROUTER(self, x, t, torch.full_like(label, self.num_classes))


def router_without_prior(self, x, t, label):
    return GAUSSIAN_ROUTER(self, x, t, label) - self.prior_CK[label].log()


def router_fed_reversed_time(self, x, t, label):
    return GAUSSIAN_ROUTER(self, x, 1 - t, label)
