"""Checks that drive the real code with closed-form experts and raise AssertionError on a wrong answer.

test_mutants.py breaks the product one line at a time and demands that the named check notices; strategies have
theirs in strategy_oracles.py. Shapes: B rows, N data points, D dimensions, K experts.
"""

import itertools
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ddm_ray.config import SamplingSettings
from ddm_ray.core import flow, mixture, solver_schedule, solvers
from ddm_ray.core.guidance import guide
from ddm_ray.core.solver_schedule import HISTORY
from ddm_ray.core.times import time_grid
from ddm_ray.sampling import driver
from ddm_ray.sampling.noise import initial_noise
from ddm_ray.sampling.request import SampleRequest, SampleResult
from tests.core import closed_forms
from tests.core.closed_forms import ONE, FiniteData, GaussianMixture, PiecewiseConstant, digits, three_gaussians


def mixture_field(system, x_BCHW, t, condition, info=None, experts=None, cluster_B=None, **settings) -> Tensor:
    """The velocity that the real code gives at (x, t), by strategy full unless asked otherwise."""
    request = {"settings": SamplingSettings(**{"strategy": "full"} | settings), "cluster_B": cluster_B}
    experts = experts or system.experts
    return driver.mixture_velocity(x_BCHW, t, condition, info or system.info(), experts, system.router, **request)


def sample_system(system, num_images: int, condition: int, info=None, **settings) -> SampleResult:
    label_B = torch.full((num_images,), condition)
    request = SampleRequest(tuple(range(num_images)), label_B, SamplingSettings(**settings))
    return driver.sample(request, info or system.info(), system.experts, system.router)


def relative(actual: Tensor, right: Tensor) -> float:
    """Worst relative error of a row (norms)."""
    return float(((actual - right).flatten(1).norm(dim=1) / right.flatten(1).norm(dim=1)).max())


def finite_points(num_rows: int, t: float, seed: int = 0, system: FiniteData | None = None) -> tuple[Tensor, Tensor]:
    """(x_t, label) of random points of a data set (the digits) at t, float64."""
    system = system or digits()
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(len(system.points_ND), (num_rows,), generator=generator)
    noise = torch.randn(num_rows, *system.shape, generator=generator, dtype=torch.float64)
    data = system.points_ND[chosen].view_as(noise)
    times_B = torch.full((num_rows,), t, dtype=torch.float64)
    return flow.interpolate(data, noise, times_B), system.label_N[chosen]


def gaussian_points(system: GaussianMixture, num_rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(x (B, 1, 1, D), label_B) where such a mixture lives, every condition in turn, float64."""
    generator = torch.Generator().manual_seed(seed)
    x_BCHW = 1.5 * torch.randn(num_rows, *system.shape, generator=generator, dtype=torch.float64)
    return x_BCHW, torch.arange(num_rows) % len(system.prior_CK)


def check_path() -> None:
    generator = torch.Generator().manual_seed(0)
    data, noise = torch.randn(2, 5, 1, 2, 2, generator=generator, dtype=torch.float64)
    t_B = torch.linspace(0.1, 0.9, 5, dtype=torch.float64)
    ahead, behind = flow.interpolate(data, noise, t_B + 1e-4), flow.interpolate(data, noise, t_B - 1e-4)
    assert torch.allclose((ahead - behind) / 2e-4, flow.velocity(data, noise), atol=1e-9)
    assert torch.equal(flow.interpolate(data, noise, torch.zeros(5)), data)


def check_finite_identity(system: FiniteData | None = None, times=(0.02, 0.1, 0.3, 0.6, 0.9, 1.0)) -> None:
    """A: sum_k p_k u_k is the velocity of all the data, conditional and not, t from .02 to 1."""
    system = system or digits()
    for t in times:
        x_BCHW, label_B = finite_points(12, t, system=system)
        label_B[::2] = system.num_classes
        times_B = torch.full((12,), t, dtype=torch.float64)
        right = system.field_of(None)(x_BCHW, times_B, label_B)
        # u = (x - E[data]) / t, so that where the two cancel an error relative to u alone says little.
        scale_B = right.flatten(1).norm(dim=1) + x_BCHW.flatten(1).norm(dim=1) / t
        actual = mixture_field(system, x_BCHW, t, label_B)
        assert ((actual - right).flatten(1).norm(dim=1) / scale_B).max() < 1e-13
        actual = mixture_field(system, x_BCHW.float(), t, label_B, info=system.info(torch.float32))
        right = system.field_of(None)(x_BCHW.float(), times_B, label_B)
        assert actual.dtype == torch.float32
        assert ((actual - right).flatten(1).norm(dim=1) / scale_B).max() < (5e-7 if system is digits() else 5e-6)


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


def check_same_endpoint(num_images: int = 8, system: FiniteData | None = None) -> None:
    """B: the mixture of exact experts and one exact model of all the data draw the same images, step by step.

    The last step lands on the nearest point wherever it began, so that the steps before tell more.
    """
    system = system or digits()
    label_B = torch.arange(num_images) % system.num_classes
    settings = SamplingSettings(steps=12, strategy="full", solver="heun")
    request = SampleRequest(tuple(range(num_images)), label_B, settings)
    path: list[Tensor] = []
    record = lambda number, t, x_BCHW: path.append(x_BCHW)  # noqa: E731
    driver.sample(request, system.info(), system.experts, system.router, on_step=record)
    field, x_BCHW = system.field_of(None), initial_noise(request.seeds, system.shape).double()
    times = torch.linspace(1, 0, 13, dtype=torch.float64)
    for (t, t_next), actual in zip(itertools.pairwise(times), path, strict=True):
        start = field(x_BCHW, t.expand(num_images), label_B)
        end = field(x_BCHW + (t_next - t) * start, t_next.expand(num_images), label_B) if t_next else start
        x_BCHW = x_BCHW + (t_next - t) * (start + end) / 2
        assert (actual - x_BCHW).abs().max() < 1e-6


def check_gaussian_field(system: GaussianMixture | None = None, times=(0.1, 0.5, 0.8)) -> None:
    """C: u = -(x + t score) / (1 - t), the score by differentiating the closed-form density."""
    system = system or three_gaussians()
    for t in times:
        x_BCHW, label_B = gaussian_points(system, 32, seed=1)
        right = system.velocity(x_BCHW.flatten(1), t, label_B)
        actual = mixture_field(system, x_BCHW, t, label_B)
        assert (actual.flatten(1) - right).abs().max() < 1e-11 * (1 + right.abs().max()) / (1 - t)


def check_scores(system: GaussianMixture | None = None, times=(0.05, 0.4, 0.9)) -> None:
    """The paper's appendix: sum_k p_k s_k = s, and the score that the mixture's velocity implies is that one."""
    system = system or three_gaussians()
    for t in times:
        x_BCHW, label_B = gaussian_points(system, 24, seed=4)
        x_BD, times_B = x_BCHW.flatten(1), torch.full((24,), t, dtype=torch.float64)
        probs_BK = mixture.posterior(system.router(x_BCHW, times_B, label_B))
        parts_KBD = torch.stack([system.score(x_BD, times_B, label_B, k) for k in range(len(system.experts))])
        right, most = system.score(x_BD, times_B, label_B), float(parts_KBD.abs().max())
        assert (torch.einsum("bk,kbd->bd", probs_BK, parts_KBD) - right).abs().max() < 1e-11 * (1 + most)
        _, noise = flow.to_data_and_noise(flow.Flow(), x_BCHW, mixture_field(system, x_BCHW, t, label_B), times_B)
        assert (-noise.flatten(1) / t - right).abs().max() < 1e-11 * (1 + most) / t


def check_moments(strategy: str, condition: int = 1, num_images: int = 3000, system=None, **fields) -> None:
    """C: samples have the true moments and component frequencies of their condition."""
    system = system or three_gaussians()
    fields = {"steps": 16, "solver": "heun"} | fields
    images_BCHW = sample_system(system, num_images, condition, strategy=strategy, **fields).images_BCHW
    check_images(system, images_BCHW, condition)


def check_images(system: GaussianMixture, images_BCHW: Tensor, condition: int) -> None:
    """Images of a mixture whose components are far apart: moments, frequencies, and each component's spread."""
    assert system.frechet(images_BCHW, condition) < 0.02
    images_BD = images_BCHW.flatten(1)
    nearest_B = torch.cdist(images_BD, system.mean_CKD[condition]).argmin(dim=1)
    frequency_K = nearest_B.bincount(minlength=3) / len(images_BD)
    assert (frequency_K - system.prior_CK[condition]).abs().max() < 0.035
    # A choice tied to the noise leaves frequencies right and bends the components.
    for k in range(3):
        off_D = images_BD[nearest_B == k].std(dim=0) / system.std_CK[condition, k] - 1
        assert off_D.abs().max() < 0.12


def check_guidance() -> None:
    """D: each branch is mixed under its own posterior, then they are combined."""
    system = digits()
    for t in (0.3, 0.7, 0.95):
        x_BCHW, label_B = finite_points(12, t, seed=2)
        times_B, null_B = torch.full((12,), t, dtype=torch.float64), torch.full((12,), system.num_classes)
        field = system.field_of(None)
        conditional, unconditional = field(x_BCHW, times_B, label_B), field(x_BCHW, times_B, null_B)
        for scale in (0.0, 1.0, 3.0):
            right = unconditional + scale * (conditional - unconditional)
            assert relative(mixture_field(system, x_BCHW, t, label_B, guidance_scale=scale), right) < 1e-12


def check_gaussian_guidance(
    system: GaussianMixture | None = None, scale: float = 2.5, t: float = 0.6, texts: closed_forms.Texts | None = None
) -> None:
    """D, and its rival by name: of the whole mixture, or of each expert, all under the conditional posterior."""
    system = texts.system if texts else system or closed_forms.guided_gaussians()
    driven, condition_of = (texts, texts.texts) if texts else (system, torch.Tensor.clone)
    x_BCHW, label_B = gaussian_points(system, 24, seed=5)
    null_B, times_B = torch.full_like(label_B, len(system.prior_CK) - 1), torch.full((24,), t, dtype=torch.float64)
    x_BD = x_BCHW.flatten(1)
    right = guide(system.velocity(x_BD, t, label_B), system.velocity(x_BD, t, null_B), scale)
    most = 1e-11 * (1 + right.abs().max()) / (1 - t)
    actual = mixture_field(driven, x_BCHW, t, condition_of(label_B), guidance_scale=scale)
    assert (actual.flatten(1) - right).abs().max() < most
    # Scale 0 is the unconditional mixture by either name: without a condition there is none to mix by.
    mixed_by_B = label_B if scale else null_B
    probs_BK = (system.prior_CK[mixed_by_B].log() + system.log_density(x_BD, times_B, mixed_by_B)).softmax(dim=1)
    each_KBD = torch.stack(
        [guide(e(x_BCHW, times_B, label_B), e(x_BCHW, times_B, null_B), scale).flatten(1) for e in system.experts]
    )
    fields = {"guidance_scale": scale, "guidance_kind": "per-expert"}
    actual = mixture_field(driven, x_BCHW, t, condition_of(label_B), **fields)
    assert (actual.flatten(1) - torch.einsum("bk,kbd->bd", probs_BK, each_KBD)).abs().max() < most


def check_guidance_interval() -> None:
    """The scale holds in steps that begin above the interval's lower end, elsewhere conditional alone."""
    system = closed_forms.guided_gaussians()
    x_BCHW, label_B = gaussian_points(system, 12, seed=6)
    for t, guided in ((0.1, False), (0.3, False), (0.31, True), (0.7, True), (0.9, False)):
        actual = mixture_field(system, x_BCHW, t, label_B, guidance_scale=3.0, guidance_interval=(0.3, 0.7))
        right = mixture_field(system, x_BCHW, t, label_B, guidance_scale=3.0 if guided else 1.0)
        assert torch.equal(actual, right)


def check_guided_once(scale: float = 1.8, num_images: int = 3000) -> None:
    """D under `once`: images are of sum_k p(k|c) q_k, q_k what guidance alone makes of expert k."""
    system = closed_forms.guided_gaussians()
    null_KD = system.mean_CKD[-1]
    for condition in range(2):
        mean_KD = null_KD + scale * (system.mean_CKD[condition] - null_KD)
        right = GaussianMixture(system.prior_CK[[condition]], mean_KD, system.std_CK[[condition]])
        for solver in ("heun", "ab2"):
            fields = {"steps": 16, "solver": solver, "guidance_scale": scale}
            images = sample_system(system, num_images // 2, condition, strategy="once", **fields).images_BCHW
            check_images(right, images, 0)


def check_guided_map(solver: str = "ab2", steps: int = 200) -> None:
    """F, guided: one expert's trajectories end at guided mean + std noise, so the branches' rows stay aligned."""
    system, cluster_B = closed_forms.guided_gaussians(), torch.arange(12) % 3
    label_B = torch.arange(12) // 6
    settings = SamplingSettings(steps=steps, guidance_scale=2.0, strategy="oracle", solver=solver)
    request = SampleRequest(tuple(range(12)), label_B, settings, cluster_B)
    images = driver.sample(request, system.info(), system.experts).images_BCHW.flatten(1)
    mean_BD = 2 * system.mean_CKD[label_B, cluster_B] - system.mean_CKD[-1, cluster_B]
    noise_BD = initial_noise(request.seeds, (1, 1, 2)).double().flatten(1)
    assert (images - (mean_BD + system.std_CK[0, cluster_B, None] * noise_BD)).abs().max() < 2e-3


def teacher(system: FiniteData, x_BCHW: Tensor, t: float, label_B: Tensor, cluster_B: Tensor) -> Tensor:
    """What a student is taught at x_t of a datum: the velocity of the expert of the datum's cluster."""
    return mixture_field(system, x_BCHW, t, label_B, strategy="oracle", cluster_B=cluster_B)


def check_distillation(system: FiniteData | None = None, t: float = 0.8) -> None:
    """E: the teacher's mean over the data that may lie behind x_t is the velocity of all the data."""
    system = system or closed_forms.random_points(3, dim=3, num_experts=4, num_classes=2)
    num_points, null = len(system.points_ND), system.num_classes
    x_BCHW, _ = finite_points(10, t, seed=7, system=system)
    times_B, null_B = torch.full((10,), t, dtype=torch.float64), torch.full((10,), null)
    weights_BN = system.log_weights(x_BCHW.flatten(1), times_B, null_B, slice(None)).softmax(dim=1)
    # Each row once for each datum that it may come from.
    rows_BN, null_BN = x_BCHW.repeat_interleave(num_points, dim=0), torch.full((10 * num_points,), null)
    taught = teacher(system, rows_BN, t, null_BN, system.cluster_N.repeat(10)).view(10, num_points, -1)
    actual = (weights_BN[:, :, None] * taught).sum(dim=1)
    right = system.field_of(None)(x_BCHW, times_B, null_B).flatten(1)
    assert (actual - right).abs().max() < 1e-12 * (1 + float(taught.abs().max()))


def map_error(solver: str, steps: int, times: str = "uniform", one: GaussianMixture = ONE) -> float:
    """F: distance to the closed-form map of one Gaussian, mean + std noise, through the whole product."""
    sampled = sample_system(one, 6, 0, steps=steps, strategy="once", solver=solver, times=times)
    right = one.mean_CKD[0, 0] + one.std_CK[0, 0] * initial_noise(range(6), one.shape).double()
    return float((sampled.images_BCHW - right).abs().max())


def grid_error(solver: str, steps: int) -> float:
    """F on a grid of alternating steps h, 2h: where coefficients for equal steps lose an order."""
    widths = torch.tensor([1.0, 2.0], dtype=torch.float64).repeat(steps // 2)
    times = 1 - torch.cat([torch.zeros(1, dtype=torch.float64), widths.cumsum(0) / widths.sum()])
    times[-1] = 0
    noise, label_B = initial_noise(range(6), (1, 1, 2)).double(), torch.zeros(6, dtype=torch.int64)
    ends = solve(
        solver, noise, times, lambda x, t: ONE.experts[0](x, torch.full((6,), t, dtype=torch.float64), label_B)
    )
    right = ONE.mean_CKD[0, 0] + ONE.std_CK[0, 0] * noise
    return float((ends - right).abs().max())


def solve(solver: str, x: Tensor, times: Tensor, field: Callable[[Tensor, float], Tensor], restarts=()) -> Tensor:
    """x at the last time, by a solver's schedule; `restarts`: steps at which history restarts."""
    history, usable = (torch.zeros_like(x),) * HISTORY, 0
    for planned in solver_schedule.schedule(solvers.SOLVERS[solver], times):
        velocity = field(solver_schedule.moved(x, history, planned["lean"].tolist()), float(planned["t"]))
        usable = 0 if planned["starts"] and planned["step"] in restarts else usable
        x = solver_schedule.moved(x, (velocity, *history), planned["moves"][usable].tolist())
        history, usable = (velocity, *history[:-1]), min(usable + 1, HISTORY)
    return x


EXACT = {name: solver for name, solver in solvers.SOLVERS.items() if not solver.draws}
"""Solvers of the ODE; the others have no map from noise to images, only a distribution."""
# On the map of one Gaussian the midpoint method gains an order.
ORDERS = {name: solver.order for name, solver in EXACT.items() if name != "midpoint"}


def check_orders() -> None:
    for solver, order in ORDERS.items():
        for error in (map_error, grid_error):
            coarse, fine = error(solver, 128), error(solver, 256)
            observed = np.log2(coarse / fine)
            assert math.isfinite(observed), (solver, error.__name__)
            assert abs(observed - order) < 0.25, (solver, error.__name__, observed)


def check_spread(steps: int = 16) -> None:
    """Images of one Gaussian by a solver that draws have the standard deviation that its coefficients make."""
    for name, solver in solvers.SOLVERS.items():
        if solver.draws:
            sampled = sample_system(ONE, 2000, 0, steps=steps, strategy="once", solver=name)
            right = variance_of_samples(name, steps) ** 0.5
            assert abs(float(sampled.images_BCHW.std(dim=0).mean()) / right - 1) < 0.04, name


def variance_of_samples(solver: str, steps: int, one: GaussianMixture = ONE) -> float:
    """The variance of images of one Gaussian by a solver that draws, one velocity a step, by its coefficients."""
    variance, data_variance = 1.0, float(one.std_CK[0, 0]) ** 2
    for planned in solver_schedule.schedule(solvers.SOLVERS[solver], time_grid("uniform", steps)):
        t = float(planned["t"])
        slope = (t - (1 - t) * data_variance) / ((1 - t) ** 2 * data_variance + t**2)
        factor, noise = float(planned["keep"] + planned["moves"][0, 0] * slope), float(planned["noise"])
        variance = factor**2 * variance + noise**2
    return variance


def check_piecewise(solver: str) -> None:
    """A sparse routing holds within a step, and history restarts at a switch: then the integral is exact."""
    sampled = sample_system(PiecewiseConstant(), 3, 0, steps=8, strategy="top-1", solver=solver)
    right = initial_noise(range(3), (1, 1, 1)).double() - 0.5 + 1.5
    assert (sampled.images_BCHW - right).abs().max() < 1e-12
    assert sampled.experts_SB[:, 0].tolist() == [0] * 4 + [1] * 4
