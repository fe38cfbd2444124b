"""Each mutant breaks the product in one place; the oracle that the real code passes must notice.

The oracles live in oracles.py and strategy_oracles.py and drive the product: trajectory, routing, mixture,
guidance, solver. The EMA's closed form (G) and its mutant are in tests/train/test_engine.py, solvers' and paths' own
mutants beside their tests.
"""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from ddm_ray.core import calibration, condition, flow, routing, solvers
from ddm_ray.errors import SamplingError
from ddm_ray.sampling import batches, choice, noise, request, state, trajectory
from ddm_ray.sampling import plan as plans
from tests.core import alterations as altered
from tests.core import closed_forms, missing_expert_oracles, oracles, strategy_oracles

pytestmark = pytest.mark.contract

ORACLES: dict[str, Callable[[], None]] = {
    "path": oracles.check_path,
    "A finite data": oracles.check_finite_identity,
    "A' top-K": oracles.check_top_renormalised,
    "B endpoint": oracles.check_same_endpoint,
    "C field": oracles.check_gaussian_field,
    "scores": oracles.check_scores,
    "C moments once": lambda: oracles.check_moments("once"),
    "C moments once, conditional": lambda: oracles.check_moments("once", condition=0),
    "C moments full": lambda: oracles.check_moments("full"),
    "D guidance": oracles.check_guidance,
    "D guidance, Gaussian": oracles.check_gaussian_guidance,
    "guidance interval": oracles.check_guidance_interval,
    "guidance within clusters": oracles.check_guided_once,
    "guided map": oracles.check_guided_map,
    "E distillation": oracles.check_distillation,
    "F orders": oracles.check_orders,
    "held routing, heun": lambda: oracles.check_piecewise("heun"),
    "held routing, ab2": lambda: oracles.check_piecewise("ab2"),
    "guidance sets in, ab2": lambda: strategy_oracles.check_history_restarts_with_guidance("ab2"),
    "missing expert": missing_expert_oracles.check_missing_expert,
    "missing expert, once": missing_expert_oracles.check_available_prior,
    "impossible experts": missing_expert_oracles.check_impossible_experts,
    "posterior": missing_expert_oracles.check_posterior,
    "top": strategy_oracles.check_top,
    "threshold": strategy_oracles.check_threshold,
    "nucleus": strategy_oracles.check_nucleus,
    "nucleus temperature": strategy_oracles.check_nucleus_temperature,
    "sticky": strategy_oracles.check_sticky,
    "reweighed": strategy_oracles.check_reweighed,
    "full by another name": strategy_oracles.check_full_by_another_name,
    "sample-k": strategy_oracles.check_sample_k,
    "sample-1 to full": strategy_oracles.check_sample_1_tends_to_full,
    "draws differ": strategy_oracles.check_draws_differ,
    "draw": strategy_oracles.check_draw,
    "oracle": strategy_oracles.check_oracle,
    "router temperature": strategy_oracles.check_router_temperature,
    "temperature fit": strategy_oracles.check_fit_temperature,
    "texts once": strategy_oracles.check_texts,
    "texts full": lambda: strategy_oracles.check_texts("full"),
    "texts guided": strategy_oracles.check_text_guidance,
    "conditions": strategy_oracles.check_conditions_are_apart,
    "steps reported": strategy_oracles.check_steps_are_reported,
}

NO_SWITCH = (choice, "differs", lambda weights_BK, others_BK: np.zeros(len(weights_BK), bool))
FINITE, GAUSSIAN = closed_forms.FiniteData, closed_forms.GaussianMixture
BLIND_PRIOR = (choice, "available_prior", lambda prior_CK, available_K: prior_CK[-1:].expand_as(prior_CK))
WRONG_SIGN = (trajectory, "mix", lambda *a: -altered.MIX(*a))
TIME_REVERSED = (state.Turn, "t_B", property(altered.time_reversed))
UNIFORM = (plans, "posterior", altered.uniform_posterior)
ROUTER_LATE = (trajectory, "router_call", altered.time_a_step_late)
LATE_GRID = (plans, "time_grid", lambda name, steps: altered.GRID(name, steps + 1)[:-1])
EARLY_GRID = (plans, "time_grid", lambda name, steps: altered.GRID(name, steps + 1)[1:])
NO_RENORMALISING = (routing, "keep", altered.kept_without_renormalising)
MISSING_KEPT = (plans, "posterior", lambda logits_BK, *available: altered.POSTERIOR(logits_BK))
MISSING_DRAWN = (choice, "available_prior", lambda prior_CK, available_K: prior_CK)
MISALIGNED = (state.Trajectories, "conditions", altered.conditions_misaligned)
ROLLED = (state.Trajectories, "conditions", altered.conditions_rolled)
NULL_DROPPED = (state.Trajectories, "conditions", altered.null_dropped)
OTHERS_ROWS = (trajectory, "mix", altered.rows_of_others)
NO_JUMP = (plans.SamplingPlan, "of", altered.history_of_guidance_kept)

# Name: (oracle, where, attribute, what stands there instead).
MUTANTS: dict[str, tuple] = {
    "target of the wrong sign": ("path", flow, "velocity", lambda data, noise: data - noise),
    "path reversed": ("path", flow, "interpolate", altered.flow_reversed),
    "velocity of the wrong sign": ("A finite data", *WRONG_SIGN),
    "velocity of the wrong sign, endpoint": ("B endpoint", *WRONG_SIGN),
    "velocity of the wrong sign, scores": ("scores", *WRONG_SIGN),
    "time reversed": ("A finite data", *TIME_REVERSED),
    "time reversed, endpoint": ("B endpoint", *TIME_REVERSED),
    "uniform weights": ("A finite data", *UNIFORM),
    "uniform weights, endpoint": ("B endpoint", *UNIFORM),
    "uniform weights, field": ("C field", *UNIFORM),
    "uniform weights, scores": ("scores", *UNIFORM),
    "uniform weights, moments": ("C moments full", *UNIFORM),
    "weights dropped": ("A finite data", trajectory, "mix", altered.unweighted),
    "experts shifted by one": ("A finite data", choice, "group_rows", altered.groups_shifted),
    "velocities of other rows": ("A finite data", *OTHERS_ROWS),
    "router fed 1 - t": ("A finite data", FINITE, "router", altered.finite_router_fed_reversed_time),
    "router fed 1 - t, moments": ("C moments full", GAUSSIAN, "router", altered.router_fed_reversed_time),
    "router a little late": ("C field", *ROUTER_LATE),
    "router blind to labels": ("A finite data", FINITE, "router", altered.finite_router_blind_to_labels),
    "no prior in the router": ("C field", GAUSSIAN, "router", altered.router_without_prior),
    "no prior in the router, moments": ("C moments full", GAUSSIAN, "router", altered.router_without_prior),
    "missing renormalisation": ("A' top-K", routing, "keep_top", altered.top_without_renormalising),
    "missing renormalisation, top": ("top", routing, "keep_top", altered.top_without_renormalising),
    "missing renormalisation, threshold": ("threshold", *NO_RENORMALISING),
    "missing renormalisation, nucleus": ("nucleus", *NO_RENORMALISING),
    "the unlikeliest kept": ("top", routing, "keep_top", altered.bottom),
    "full held within a step": ("B endpoint", request, "parse_strategy", altered.full_held_within_a_step),
    "once by argmax": ("C moments once", routing, "draw_expert", altered.most_likely),
    "once with the noise's own stream": (
        "C moments once",
        choice,
        "routing_uniforms",
        altered.uniforms_of_the_noise,
    ),
    "once, one draw for all": ("C moments once", choice, "routing_uniforms", altered.uniforms_of_the_first_seed),
    "once blind to the condition": ("C moments once, conditional", *BLIND_PRIOR),
    "draw by a shifted CDF": ("draw", routing, "draw_expert", altered.draw_one_too_far),
    "guidance of each expert": ("D guidance", plans, "_rule", altered.conditional_posterior_for_both),
    "guidance of each expert, Gaussian": (
        "D guidance, Gaussian",
        plans,
        "_rule",
        altered.conditional_posterior_for_both,
    ),
    "guidance kinds swapped": ("D guidance, Gaussian", plans, "_rule", altered.guidance_kinds_swapped),
    "guidance with its ends swapped": ("D guidance", trajectory, "guide", lambda c, u, s: c + s * (u - c)),
    "guidance with branches swapped": (
        "D guidance, Gaussian",
        state.Trajectories,
        "conditions",
        altered.branches_swapped,
    ),
    "guidance scale one too high": ("D guidance", trajectory, "guide", lambda c, u, s: c + s * (c - u)),
    "null condition dropped": ("D guidance", *NULL_DROPPED),
    "null condition dropped, once": ("guidance within clusters", *NULL_DROPPED),
    "null condition dropped, texts": ("texts guided", *NULL_DROPPED),
    "null label off by one": (
        "D guidance",
        request.MixtureInfo,
        "null",
        lambda self, rows: torch.full((rows,), self.num_classes - 1),
    ),
    "conditions misaligned with x": ("D guidance", *MISALIGNED),
    "conditions misaligned with x, once": ("guided map", *MISALIGNED),
    "conditions misaligned with x, texts": ("texts guided", *MISALIGNED),
    "conditions rolled": ("A finite data", *ROLLED),
    "guidance interval ignored": ("guidance interval", plans, "scale_at", altered.interval_ignored),
    "guidance interval reversed": ("guidance interval", plans, "scale_at", altered.interval_reversed),
    "guidance interval inside out": ("guidance interval", plans, "scale_at", altered.interval_inside_out),
    "history kept where guidance sets in": ("guidance sets in, ab2", *NO_JUMP),
    "teacher by argmax": ("E distillation", request, "parse_strategy", altered.teacher_by_argmax),
    "time grid off by one": ("F orders", *LATE_GRID),
    "time grid one step late": ("F orders", *EARLY_GRID),
    "held routing re-evaluated": ("held routing, heun", request, "parse_strategy", altered.rerouted_at_every_velocity),
    "history kept over a switch": ("held routing, ab2", *NO_SWITCH),
    "missing expert kept in the posterior": ("missing expert", *MISSING_KEPT),
    "missing expert drawn": ("missing expert, once", *MISSING_DRAWN),
    "uniform where the available are impossible": (
        "impossible experts",
        plans,
        "posterior",
        lambda logits_BK, available_K, prior_K: altered.POSTERIOR(logits_BK, available_K),
    ),
    "sticky's margin ignored": ("sticky", routing.Sticky, "route", altered.sticky_without_margin),
    "sticky's hysteresis reversed": ("sticky", routing.Sticky, "route", altered.sticky_reversed),
    "sticky for ever": ("sticky", routing.Sticky, "route", altered.sticky_for_ever),
    "threshold without its floor": ("threshold", routing.Threshold, "route", altered.threshold_without_floor),
    "threshold of the likeliest": ("threshold", routing.Threshold, "route", altered.threshold_of_the_likeliest),
    "threshold with a floor of two": ("threshold", routing.Threshold, "route", altered.threshold_or_two),
    "nucleus without the crossing expert": (
        "nucleus",
        routing.Nucleus,
        "route",
        altered.nucleus_without_the_crossing_expert,
    ),
    "nucleus one too many": ("nucleus", routing.Nucleus, "route", altered.nucleus_one_too_many),
    "nucleus temperature inverted": (
        "nucleus temperature",
        routing.Nucleus,
        "route",
        altered.nucleus_temperature_inverted,
    ),
    "nucleus temperature of the choice alone": (
        "nucleus temperature",
        routing.Nucleus,
        "route",
        altered.nucleus_temperature_of_choice_alone,
    ),
    "weights held within a step": (
        "full by another name",
        routing.Strategy,
        "reweigh",
        lambda self, held, probs_BK: held,
    ),
    "chosen anew within a step": (
        "reweighed",
        routing.Strategy,
        "reweigh",
        lambda self, held, probs_BK: self.route(probs_BK, held, torch.zeros_like(probs_BK)),
    ),
    "nucleus temperature at a step's start alone": (
        "reweighed",
        routing.Nucleus,
        "reweigh",
        routing.Strategy.reweigh,
    ),
    "sample-k with replacement": ("sample-k", routing.SampleK, "route", altered.sample_with_replacement),
    "sample-k without renormalising": ("sample-k", routing.SampleK, "route", altered.sample_without_renormalising),
    "sample-k weighed alike": ("sample-k", routing.SampleK, "route", altered.sample_weighed_alike),
    "sample-k uniformly": ("sample-k", routing.SampleK, "route", altered.sample_uniformly),
    "sample-1 uniformly": ("sample-1 to full", routing.SampleK, "route", altered.sample_uniformly),
    "sample-1, the same at every step": (
        "sample-1 to full",
        choice,
        "routing_uniforms",
        altered.uniforms_of_the_first_step,
    ),
    "draws, the same at every step": (
        "draws differ",
        noise,
        "routing_uniforms",
        altered.uniforms_of_the_first_step,
    ),
    "draws, the same for every seed": (
        "draws differ",
        noise,
        "routing_uniforms",
        altered.uniforms_of_the_first_seed,
    ),
    "oracle of another cluster": ("oracle", routing.Oracle, "route", altered.oracle_of_the_next_cluster),
    "clusters of other rows": ("oracle", request.SampleRequest, "rows", altered.clusters_left_behind),
    "parts joined in their own order": ("oracle", batches, "joined", altered.parts_in_their_own_order),
    "router temperature inverted": (
        "router temperature",
        plans,
        "tempered",
        lambda logits_NK, temperature: logits_NK * temperature,
    ),
    "fitted temperature inverted": (
        "temperature fit",
        calibration,
        "fit_temperature",
        lambda logits_NK, expert_N: 1 / altered.FITTED(logits_NK, expert_N),
    ),
    "text's k from the image's own noise": (
        "texts once",
        choice,
        "initial_noise",
        altered.noise_of_the_image_in_any_case,
    ),
    "text's prior uniform": ("texts full", *UNIFORM),
    "text's padding counted": ("texts guided", condition.Text, "__getitem__", altered.text_mask_misaligned),
    "conditions joined in reverse": (
        "conditions",
        condition,
        "join",
        lambda parts: altered.JOIN(parts[::-1]),
    ),
    "steps reported with numbers from 1": ("steps reported", plans.SamplingPlan, "of", altered.numbered_from_one),
    "the last step not reported": ("steps reported", plans, "schedule", altered.last_not_reported),
}


@pytest.fixture(autouse=True)
def tables_of_its_own() -> Iterator[None]:
    """No tables of velocities that were made before a part was replaced, and none for those who come after."""
    plans._velocities.cache_clear()
    yield
    plans._velocities.cache_clear()


@pytest.mark.parametrize("oracle", ORACLES)
def test_the_real_code_passes(oracle: str) -> None:
    ORACLES[oracle]()


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_mutant_fails(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle, owner, name, alteration = MUTANTS[mutant]
    monkeypatch.setattr(owner, name, alteration)
    with pytest.raises((AssertionError, SamplingError)) as noticed:
        ORACLES[oracle]()
    if noticed.type is AssertionError:
        assert noticed.traceback[-1].path.name.endswith("oracles.py")
    else:
        assert mutant in ("missing expert kept in the posterior", "missing expert drawn")


@pytest.mark.parametrize(
    ("solver", "alteration"),
    [
        ("heun", altered.EVALUATED_A_STEP_LATE),
        ("ab2", altered.AB2_FOR_EQUAL_STEPS),
        ("ab3", altered.AB3_FOR_EQUAL_STEPS),
    ],
)
def test_the_solver_mutant_fails(solver, alteration, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(solvers.SOLVERS, solver, alteration)
    monkeypatch.setitem(oracles.EXACT, solver, alteration)
    with pytest.raises(AssertionError):
        oracles.check_orders()


def test_noise_that_is_the_same_at_each_step_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    oracles.check_spread()
    monkeypatch.setattr(state.Trajectories, "step_noise", altered.noise_of_one_step)
    with pytest.raises(AssertionError):
        oracles.check_spread()
