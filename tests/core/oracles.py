"""Checks that drive the real code with closed-form experts and raise AssertionError on a wrong answer.

test_mutants.py breaks the product one line at a time and demands that the named check notices.
Shapes: B rows, D dimensions, K experts.
"""

import itertools
from collections.abc import Generator

import numpy as np
import torch
from torch import Tensor

from ddm_ray.core import flow, solvers
from ddm_ray.core.solvers import Ask
from ddm_ray.sampling.driver import sample
from ddm_ray.sampling.trajectory import Sampled, SampleRequest, initial_noise
from tests.core.closed_forms import ONE, FiniteData, PiecewiseConstant, digits, three_gaussians


def probe(x_BCHW: Tensor, t: float):
    """A solver that asks once, at (x, t), and returns the velocity: a window on the real code's field."""

    def solver(noise: Tensor, times: Tensor) -> Generator[Ask, solvers.Answer, Tensor]:
        answer = yield Ask(x_BCHW, t, new_step=True)
        return answer.velocity_BCHW

    return solver


def mixture_field(system, x_BCHW, t, label_B, strategy="full", scale=1.0, info=None, experts=None) -> Tensor:
    """The velocity that the real trajectory code gives at (x, t)."""
    solvers.SOLVERS["probe"] = probe(x_BCHW, t)
    try:
        seeds = tuple(range(len(x_BCHW)))
        request = SampleRequest(seeds, label_B, 1, scale, strategy, "probe")
        return sample(request, info or system.info(), experts or system.experts, system.router).images_BCHW
    finally:
        del solvers.SOLVERS["probe"]


def sample_system(system, num_images: int, condition: int, **fields) -> Sampled:
    label_B = torch.full((num_images,), condition)
    return sample(
        SampleRequest(tuple(range(num_images)), label_B, **fields),
        system.info(),
        system.experts,
        system.router,
    )


def relative(found: Tensor, right: Tensor) -> float:
    """Worst relative error of a row (norms)."""
    return float(((found - right).flatten(1).norm(dim=1) / right.flatten(1).norm(dim=1)).max())


def finite_points(num_rows: int, t: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(x_t, label) of random digits at t, float64."""
    system = digits()
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(len(system.points_ND), (num_rows,), generator=generator)
    noise = torch.randn(num_rows, 1, 8, 8, generator=generator, dtype=torch.float64)
    data = system.points_ND[chosen].view_as(noise)
    times_B = torch.full((num_rows,), t, dtype=torch.float64)
    return flow.interpolate(data, noise, times_B), system.label_N[chosen]


def check_path() -> None:
    generator = torch.Generator().manual_seed(0)
    data, noise = torch.randn(2, 5, 1, 2, 2, generator=generator, dtype=torch.float64)
    t_B = torch.linspace(0.1, 0.9, 5, dtype=torch.float64)
    ahead, behind = flow.interpolate(data, noise, t_B + 1e-4), flow.interpolate(data, noise, t_B - 1e-4)
    assert torch.allclose((ahead - behind) / 2e-4, flow.velocity(data, noise), atol=1e-9)
    assert torch.equal(flow.interpolate(data, noise, torch.zeros(5)), data)


def check_finite_identity() -> None:
    """A: sum_k p_k u_k is the velocity of all the data, conditional and not, t from .02 to 1."""
    system = digits()
    for t in (0.02, 0.1, 0.3, 0.6, 0.9, 1.0):
        x_BCHW, label_B = finite_points(12, t)
        label_B[::2] = system.num_classes
        times_B = torch.full((12,), t, dtype=torch.float64)
        right = system.field_of(None)(x_BCHW, times_B, label_B)
        assert relative(mixture_field(system, x_BCHW, t, label_B), right) < 1e-13
        found = mixture_field(system, x_BCHW.float(), t, label_B, info=system.info(torch.float32))
        right = system.field_of(None)(x_BCHW.float(), times_B, label_B)
        assert found.dtype == torch.float32
        assert relative(found, right) < 5e-7


def top_error(kept: int, t: float = 0.9, num_rows: int = 64) -> float:
    """Mean relative error of top-`kept` on the digits."""
    system = digits()
    x_BCHW, _ = finite_points(num_rows, t)
    label_B = torch.full((num_rows,), system.num_classes)
    right = system.field_of(None)(x_BCHW, torch.full((num_rows,), t, dtype=torch.float64), label_B)
    off = mixture_field(system, x_BCHW, t, label_B, strategy=f"top-{kept}") - right
    return float((off.flatten(1).norm(dim=1) / right.flatten(1).norm(dim=1)).mean())


def check_top_renormalised() -> None:
    """A': the few experts kept carry the whole weight, so the field is off by their bias alone."""
    assert top_error(8) < 1e-13
    assert top_error(2) < top_error(1) < 0.3


def check_same_endpoint(num_images: int = 8) -> None:
    """B: the mixture of exact experts and one exact model of all the data draw the same images."""
    system = digits()
    label_B = torch.arange(num_images) % system.num_classes
    request = SampleRequest(tuple(range(num_images)), label_B, 12, 1.0, "full", "heun")
    mixture = sample(request, system.info(), system.experts, system.router).images_BCHW
    seeds_noise = initial_noise(request.seeds, (1, 8, 8)).double()
    field, x_BCHW = system.field_of(None), seeds_noise
    times = torch.linspace(1, 0, 13, dtype=torch.float64)
    for t, t_next in itertools.pairwise(times):
        start = field(x_BCHW, t.expand(num_images), label_B)
        end = field(x_BCHW + (t_next - t) * start, t_next.expand(num_images), label_B)
        x_BCHW = x_BCHW + (t_next - t) * (start + end) / 2
    assert (mixture - x_BCHW).abs().max() < 1e-6


def check_gaussian_field() -> None:
    """C: u = -(x + t score) / (1 - t), the score by differentiating the closed-form density."""
    system = three_gaussians()
    generator = torch.Generator().manual_seed(1)
    for t in (0.1, 0.5, 0.8):
        x_BD = torch.randn(32, 2, generator=generator, dtype=torch.float64).requires_grad_()
        times_B, label_B = torch.full((32,), t, dtype=torch.float64), torch.arange(32) % 2
        log_density = system.log_joint(x_BD, times_B, label_B).logsumexp(dim=1).sum()
        (score_BD,) = torch.autograd.grad(log_density, x_BD)
        right = -(x_BD.detach() + t * score_BD) / (1 - t)
        found = mixture_field(system, x_BD.detach().view(32, 1, 1, 2), t, label_B)
        assert relative(found.view(32, 2), right) < 1e-12


def check_moments(strategy: str, condition: int = 1, num_images: int = 3000) -> None:
    """C: samples have the true moments and component frequencies of their condition."""
    system = three_gaussians()
    sampled = sample_system(system, num_images, condition, steps=16, strategy=strategy, solver="heun")
    assert system.frechet(sampled.images_BCHW, condition) < 0.02
    nearest_BK = torch.cdist(sampled.images_BCHW.flatten(1), system.mean_KD)
    frequency_K = nearest_BK.argmin(dim=1).bincount(minlength=3) / num_images
    assert (frequency_K - system.prior_CK[condition]).abs().max() < 0.035
    # Within each component too: a choice tied to the noise leaves frequencies right and bends the components.
    for k in range(3):
        images_BD = sampled.images_BCHW.flatten(1)[nearest_BK.argmin(dim=1) == k]
        assert (images_BD.std(dim=0) / system.std_K[k] - 1).abs().max() < 0.12


def check_guidance() -> None:
    """D: each branch is mixed under its own posterior, then they are combined."""
    system = digits()
    for t in (0.3, 0.7, 0.95):
        x_BCHW, label_B = finite_points(12, t, seed=2)
        times_B, null_B = torch.full((12,), t, dtype=torch.float64), torch.full((12,), system.num_classes)
        field = system.field_of(None)
        conditional, unconditional = field(x_BCHW, times_B, label_B), field(x_BCHW, times_B, null_B)
        right = unconditional + 3 * (conditional - unconditional)
        assert relative(mixture_field(system, x_BCHW, t, label_B, scale=3.0), right) < 1e-12
        assert relative(mixture_field(system, x_BCHW, t, label_B, scale=0.0), unconditional) < 1e-13


def map_error(solver: str, steps: int) -> float:
    """F: distance to the closed-form map of one Gaussian, mean + std noise, through the whole product."""
    sampled = sample_system(ONE, 6, 0, steps=steps, strategy="once", solver=solver)
    right = ONE.mean_KD[0] + ONE.std_K[0] * initial_noise(range(6), (1, 1, 2)).double()
    return float((sampled.images_BCHW - right).abs().max())


def grid_error(solver: str, steps: int) -> float:
    """F on a grid of alternating steps h, 2h: where coefficients for equal steps lose an order."""
    widths = torch.tensor([1.0, 2.0], dtype=torch.float64).repeat(steps // 2)
    times = 1 - torch.cat([torch.zeros(1, dtype=torch.float64), widths.cumsum(0) / widths.sum()])
    noise = initial_noise(range(6), (1, 1, 2)).double()
    asking = solvers.SOLVERS[solver](noise, times)
    ask = next(asking)
    while True:
        velocity = ONE.experts[0](ask.x_BCHW, torch.full((6,), ask.t, dtype=torch.float64), None)
        try:
            ask = asking.send(solvers.Answer(velocity))
        except StopIteration as end:
            return float((end.value - (ONE.mean_KD[0] + ONE.std_K[0] * noise)).abs().max())


ORDERS = {"euler": 1, "heun": 2, "ab2": 2}


def check_orders() -> None:
    for solver, order in ORDERS.items():
        for error in (map_error, grid_error):
            observed = np.log2(error(solver, 64) / error(solver, 128))
            assert abs(observed - order) < 0.25, (solver, error.__name__, observed)


def check_piecewise(solver: str) -> None:
    """A sparse routing holds within a step, and history restarts at a switch: then the integral is exact."""
    sampled = sample_system(PiecewiseConstant(), 3, 0, steps=8, strategy="top-1", solver=solver)
    right = initial_noise(range(3), (1, 1, 1)).double() - 0.5 + 1.5
    assert (sampled.images_BCHW - right).abs().max() < 1e-12
    assert sampled.experts_SB[:, 0].tolist() == [0] * 4 + [1] * 4


def check_missing_expert() -> None:
    """Without expert 2 the field is that of the data without its cluster."""
    system = digits()
    kept_N = system.cluster_N != 2
    rest = FiniteData(system.points_ND[kept_N].view(-1, 1, 8, 8), system.cluster_N[kept_N], system.label_N[kept_N])
    experts = [None if k == 2 else expert for k, expert in enumerate(system.experts)]
    for t in (0.3, 0.9):
        x_BCHW, _ = finite_points(8, t, seed=3)
        null_B = torch.full((8,), system.num_classes)
        right = rest.field_of(None)(x_BCHW, torch.full((8,), t, dtype=torch.float64), null_B)
        assert relative(mixture_field(system, x_BCHW, t, null_B, experts=experts), right) < 1e-12
