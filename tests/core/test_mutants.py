"""Each mutant breaks the product in one place; the oracle that the real code passes must notice.

The oracles live in oracles.py and drive the whole path: trajectory, routing, mixture, guidance, solver.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from ddm_ray.core import flow, mixture, routing, solvers
from ddm_ray.errors import SamplingError
from ddm_ray.sampling import trajectory
from tests.core import closed_forms, oracles

REAL_POSTERIOR, REAL_MIX, REAL_GROUPS = mixture.posterior, mixture.mix, mixture.group_rows
REAL_ROWS, REAL_PARSE = trajectory._Trajectories._rows, routing.parse_strategy
REAL_FINITE_ROUTER, REAL_GAUSSIAN_ROUTER = closed_forms.FiniteData.router, closed_forms.GaussianMixture.router

ORACLES: dict[str, Callable[[], None]] = {
    "path": oracles.check_path,
    "A finite data": oracles.check_finite_identity,
    "A' top-K": oracles.check_top_renormalised,
    "B endpoint": oracles.check_same_endpoint,
    "C field": oracles.check_gaussian_field,
    "C moments once": lambda: oracles.check_moments("once"),
    "C moments once, conditional": lambda: oracles.check_moments("once", condition=0),
    "C moments full": lambda: oracles.check_moments("full"),
    "D guidance": oracles.check_guidance,
    "F orders": oracles.check_orders,
    "held routing, heun": lambda: oracles.check_piecewise("heun"),
    "held routing, ab2": lambda: oracles.check_piecewise("ab2"),
    "missing expert": oracles.check_missing_expert,
}


def flow_reversed(data, noise, t_B):
    t = flow.along_batch(t_B, data)
    return t * data + (1 - t) * noise


def time_reversed(self, ask, branches):
    x, t, label = REAL_ROWS(self, ask, branches)
    return x, 1 - t, label


def uniform_posterior(logits_BK, alive_K=None):
    return REAL_POSTERIOR(torch.zeros_like(logits_BK), alive_K)


def conditional_posterior_for_both(logits_BK, alive_K=None):
    """Every expert guided by itself, all under the conditional posterior."""
    probs_BK = REAL_POSTERIOR(logits_BK, alive_K)
    half = len(probs_BK) // 2
    return torch.cat([probs_BK[:half], probs_BK[:half]])


def top_without_renormalising(probs_BK, kept):
    sorted_BK, order_BK = torch.sort(probs_BK, dim=1, descending=True, stable=True)
    return routing.Routing(order_BK[:, :kept], sorted_BK[:, :kept])


def groups_shifted(chosen):
    groups = REAL_GROUPS(chosen)
    return [replace(g, expert=(g.expert + 1) % (int(chosen.experts_Bk.max()) + 1)) for g in groups]


def groups_unweighted(chosen):
    return [replace(g, weights_R=torch.ones_like(g.weights_R)) for g in REAL_GROUPS(chosen)]


def most_likely(prior_BK, uniforms_B):
    return routing.keep_top(prior_BK, 1)


def uniforms_of_the_noise(seeds):
    noise = trajectory.initial_noise(seeds, (1, 1, 2))[:, 0, 0, 0].double()
    return torch.special.ndtr(noise)


def evaluated_a_step_late(x_BCHW, times):
    for t, t_next in solvers._steps(times):
        velocity = (yield solvers.Ask(x_BCHW, t_next, True)).velocity_BCHW
        late = (yield solvers.Ask(x_BCHW + (t_next - t) * velocity, t_next, False)).velocity_BCHW
        x_BCHW = x_BCHW + (t_next - t) * (velocity + late) / 2
    return x_BCHW


def ab2_for_equal_steps(x_BCHW, times):
    previous = None
    for t, t_next in solvers._steps(times):
        velocity = (yield solvers.Ask(x_BCHW, t, True)).velocity_BCHW
        previous = velocity if previous is None else previous
        x_BCHW = x_BCHW + (t_next - t) * (1.5 * velocity - 0.5 * previous)
        previous = velocity
    return x_BCHW


def rerouted_at_every_velocity(name, num_experts):
    return replace(REAL_PARSE(name, num_experts), every_velocity=True)


def finite_router_fed_reversed_time(self, x, t, label):
    return REAL_FINITE_ROUTER(self, x, 1 - t, label)


def finite_router_blind_to_labels(self, x, t, label):
    return REAL_FINITE_ROUTER(self, x, t, torch.full_like(label, self.num_classes))


def router_without_prior(self, x, t, label):
    return REAL_GAUSSIAN_ROUTER(self, x, t, label) - self.prior_CK[label].log()


def router_fed_reversed_time(self, x, t, label):
    return REAL_GAUSSIAN_ROUTER(self, x, 1 - t, label)


STATE = trajectory._Trajectories
MUTANTS = {
    "target of the wrong sign": ("path", flow, "velocity", lambda data, noise: data - noise),
    "path reversed": ("path", flow, "interpolate", flow_reversed),
    "velocity of the wrong sign": ("A finite data", trajectory, "mix", lambda *a: -REAL_MIX(*a)),
    "velocity of the wrong sign, endpoint": ("B endpoint", trajectory, "mix", lambda *a: -REAL_MIX(*a)),
    "time reversed": ("A finite data", STATE, "_rows", time_reversed),
    "time reversed, endpoint": ("B endpoint", STATE, "_rows", time_reversed),
    "uniform weights": ("A finite data", trajectory, "posterior", uniform_posterior),
    "uniform weights, endpoint": ("B endpoint", trajectory, "posterior", uniform_posterior),
    "uniform weights, field": ("C field", trajectory, "posterior", uniform_posterior),
    "uniform weights, moments": ("C moments full", trajectory, "posterior", uniform_posterior),
    "weights dropped": ("A finite data", trajectory, "group_rows", groups_unweighted),
    "experts shifted by one": ("A finite data", trajectory, "group_rows", groups_shifted),
    "router fed 1 - t": ("A finite data", closed_forms.FiniteData, "router", finite_router_fed_reversed_time),
    "router blind to labels": (
        "A finite data",
        closed_forms.FiniteData,
        "router",
        finite_router_blind_to_labels,
    ),
    "missing renormalisation": ("A' top-K", routing, "keep_top", top_without_renormalising),
    "no prior in the router": ("C field", closed_forms.GaussianMixture, "router", router_without_prior),
    "no prior in the router, moments": (
        "C moments full",
        closed_forms.GaussianMixture,
        "router",
        router_without_prior,
    ),
    "router fed 1 - t, moments": (
        "C moments full",
        closed_forms.GaussianMixture,
        "router",
        router_fed_reversed_time,
    ),
    "once by argmax": ("C moments once", routing, "draw", most_likely),
    "once with the noise's own stream": (
        "C moments once",
        trajectory,
        "routing_uniforms",
        uniforms_of_the_noise,
    ),
    "once blind to the condition": (
        "C moments once, conditional",
        trajectory,
        "alive_prior",
        lambda prior_CK, alive_K: prior_CK[-1:].expand_as(prior_CK),
    ),
    "guidance of each expert": ("D guidance", trajectory, "posterior", conditional_posterior_for_both),
    "guidance with branches swapped": ("D guidance", trajectory, "guide", lambda c, u, s: c + s * (u - c)),
    "guidance scale one too high": ("D guidance", trajectory, "guide", lambda c, u, s: c + s * (c - u)),
    "time grid off by one": (
        "F orders",
        trajectory,
        "uniform_times",
        lambda steps: torch.linspace(1, 0, steps + 2, dtype=torch.float64)[:-1],
    ),
    "held routing re-evaluated": (
        "held routing, heun",
        trajectory,
        "parse_strategy",
        rerouted_at_every_velocity,
    ),
    "history kept over a switch": (
        "held routing, ab2",
        routing.Routing,
        "differs",
        lambda self, other, num_experts: torch.zeros(len(self.experts_Bk), dtype=torch.bool),
    ),
    "dead expert kept in the posterior": (
        "missing expert",
        trajectory,
        "posterior",
        lambda logits_BK, alive_K=None: REAL_POSTERIOR(logits_BK),
    ),
}


@pytest.mark.parametrize("oracle", ORACLES)
def test_the_real_code_passes(oracle: str) -> None:
    ORACLES[oracle]()


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_mutant_fails(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle, owner, name, altered = MUTANTS[mutant]
    monkeypatch.setattr(owner, name, altered)
    with pytest.raises((AssertionError, SamplingError)) as noticed:
        ORACLES[oracle]()
    if noticed.type is AssertionError:
        assert noticed.traceback[-1].path.name == "oracles.py"
    else:
        assert mutant == "dead expert kept in the posterior"


@pytest.mark.parametrize(("solver", "altered"), [("heun", evaluated_a_step_late), ("ab2", ab2_for_equal_steps)])
def test_the_solver_mutant_fails(solver, altered, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(solvers.SOLVERS, solver, altered)
    with pytest.raises(AssertionError):
        oracles.check_orders()
