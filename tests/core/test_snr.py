import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddm_ray.config import SamplingSettings
from ddm_ray.core import flow
from ddm_ray.core.flow import PATHS, Flow
from ddm_ray.core.snr import MatchedRouter, VelocityField, as_prediction, at_matched_snr, velocity_field
from ddm_ray.errors import SamplingError
from ddm_ray.sampling import driver
from ddm_ray.sampling.request import MixtureInfo, SampleRequest
from tests.core.paths_closed_form import (
    PAIRS,
    ExactNetwork,
    ExactRouter,
    PathMixture,
    as_images,
    mixtures,
    relative,
)

T_B = torch.tensor([0.02, 0.03, 0.2, 0.45, 0.5, 0.55, 0.8, 0.97, 0.98], dtype=torch.float64)
NO_CONDITION = torch.zeros(len(T_B), dtype=torch.int64)


@settings(deadline=None, max_examples=60)
@given(mixture=mixtures(), of=st.sampled_from(PAIRS), seed=st.integers(0, 2**32))
def test_an_exact_expert_of_any_path_and_prediction_is_the_exact_velocity(mixture, of: Flow, seed: int) -> None:
    x_BD = mixture.points(seed, len(T_B), T_B)
    right = mixture.linear_velocity(x_BD, T_B)
    actual = VelocityField(ExactNetwork(mixture, of), of)(as_images(x_BD), T_B, NO_CONDITION).flatten(1)
    # By x too, since a velocity may be all but 0 where its parts aren't.
    size_B = right.norm(dim=1) + x_BD.norm(dim=1) + mixture.mean_KD.norm(dim=1).max()
    assert ((actual - right).norm(dim=1) / size_B).max() < 1e-9


@pytest.mark.parametrize("of", PAIRS, ids=str)
def test_relative_to_the_velocity_alone_and_conversion_without_matching_is_noticed(of: Flow) -> None:
    mixture = PathMixture.random(3, 4, 5, (0.2, 0.8))
    x_BD = mixture.points(1, len(T_B), T_B)
    right = as_images(mixture.linear_velocity(x_BD, T_B))
    network = ExactNetwork(mixture, of)
    assert relative(velocity_field(network, of)(as_images(x_BD), T_B, NO_CONDITION), right) < 1e-9
    data, noise = flow.to_data_and_noise(of, as_images(x_BD), network(as_images(x_BD), T_B), T_B)
    if of.path == "linear":
        assert relative(noise - data, right) < 1e-9
    else:
        off_B = (noise - data - right).flatten(1).norm(dim=1) / right.flatten(1).norm(dim=1)
        assert off_B[2:-2].min() > 0.05
        at_t = ExactNetwork(mixture, of)(as_images(x_BD), at_matched_snr(of, x_BD, T_B)[1])
        data, noise = flow.to_data_and_noise(of, as_images(x_BD), at_t, at_matched_snr(of, x_BD, T_B)[1])
        assert relative((noise - data)[2:-2], right[2:-2]) > 0.05


@pytest.mark.parametrize("of", PAIRS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_ends_are_finite_and_close(of: Flow, dtype: torch.dtype) -> None:
    mixture = PathMixture.random(5, 3, 4, (0.3, 0.8))
    t_B = torch.tensor([0.0, 1e-6, 1e-3, 0.995, 0.9999, 1.0], dtype=torch.float64)
    x_BD = mixture.points(2, len(t_B), t_B)
    right = as_images(mixture.linear_velocity(x_BD, t_B))
    network = ExactNetwork(mixture, of)
    actual = VelocityField(network, of)(as_images(x_BD).to(dtype), t_B.to(dtype), NO_CONDITION)
    assert actual.dtype == dtype
    # Of the order of the last alpha or sigma that the network is asked at: .02, and .006 at ddpm's own end.
    near_data = 4e-2 if of.prediction in ("data", "score") else 1e-2
    near_noise = 6e-2 if of.prediction in ("noise", "score") else 2e-2 if of.path == "ddpm" else 5e-3
    assert relative(actual.double()[:3], right[:3]) < near_data
    if of.prediction == "data":
        matched_BCHW, matched_B = at_matched_snr(of, as_images(x_BD), t_B)
        data = as_images(x_BD) - flow.append_dims(t_B, right) * actual.double()
        assert relative(data[3:], network(matched_BCHW, matched_B)[3:]) < 1e-5
    assert relative(actual.double()[3:], right[3:]) < near_noise


def unmatched(ratio: float, nearest: float) -> float:
    """Error of N(0, 1) data's E[noise | x] at sigma / alpha = `ratio` for that at `nearest`, over x's own deviation."""
    return math.hypot(1, ratio) * abs(ratio / (1 + ratio**2) - nearest / (1 + nearest**2))


@pytest.mark.parametrize("of", PAIRS, ids=str)
@pytest.mark.parametrize("std", [2.0, 1.0, 0.3, 0.1, 0.02, 1e-4])
def test_the_error_near_the_ends_is_as_documented(of: Flow, std: float) -> None:
    one = PathMixture(torch.ones(1).double(), torch.zeros(1, 3).double(), torch.tensor([std]).double())
    least_sigma = 0.02 if of.prediction in ("data", "score") else 0.0
    least_alpha = 0.02 if of.prediction in ("noise", "score") else 0.00636 if of.path == "ddpm" else 0.0
    for t in (0.0, 1e-4, 1e-3, 1e-2, 0.019, 0.03, 0.97, 0.985, 0.995, 0.999, 1.0):
        t_B = torch.full((50,), t, dtype=torch.float64)
        x_BD = one.points(0, 50, t_B)
        actual = VelocityField(ExactNetwork(one, of), of)(as_images(x_BD), t_B, NO_CONDITION).flatten(1)
        if t < 0.5:
            ratio = t / (1 - t)
            error = unmatched(ratio / std, max(ratio, least_sigma) / std) / (1 - t)
            assert error <= min(least_sigma / std, 1) / (1 - t)
        else:
            ratio = (1 - t) / t
            error = std * unmatched(ratio * std, max(ratio, least_alpha) * std) / t
            assert error <= least_alpha * std**2 / t
        normal_BD = x_BD / math.hypot((1 - t) * std, t)
        off_BD = (actual - one.linear_velocity(x_BD, t_B)).abs()
        torch.testing.assert_close(off_BD, error * normal_BD.abs(), rtol=1e-3, atol=2e-4 if error else 1e-9)


def test_points_of_data_keep_the_documented_noise_in_many_steps() -> None:
    point = PathMixture(torch.ones(1).double(), torch.full((1, 4), 0.7).double(), torch.zeros(1).double())
    noise = torch.randn(500, 1, 1, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for prediction, most in (("data", 0.008), ("score", 0.008), ("velocity", 1e-12), ("noise", 1e-9)):
        of = Flow("linear", prediction)
        field, x_BCHW = VelocityField(ExactNetwork(point, of), of), noise
        times = torch.linspace(1, 0, 401, dtype=torch.float64)
        for t, t_next in itertools.pairwise(times):
            x_BCHW = x_BCHW + (t_next - t) * field(x_BCHW, t.expand(500), NO_CONDITION)
        assert most / 2 < x_BCHW.std() < most if most > 1e-3 else x_BCHW.std() < most


@pytest.mark.parametrize("of", [pair for pair in PAIRS if pair.prediction in ("noise", "score")], ids=str)
def test_a_networks_small_error_stays_small_at_pure_noise(of: Flow) -> None:
    """Data are found by dividing by alpha, which is .02 at the last time that the network is asked at."""
    mixture, eps = PathMixture.random(5, 3, 4, (0.3, 0.8)), 0.01
    x_BD, t_B = mixture.points(2, 3, torch.ones(3, dtype=torch.float64)), torch.ones(3, dtype=torch.float64)
    exact = ExactNetwork(mixture, of)

    def off(*inputs):
        return exact(*inputs) + eps

    right, actual = (VelocityField(network, of)(as_images(x_BD), t_B, NO_CONDITION[:3]) for network in (exact, off))
    # A score's error counts times sigma, all but 1 here.
    assert 10 * eps < (actual - right).abs().max() < 51 * eps


@pytest.mark.parametrize("t", [-1e-3, 1.001, float("nan")])
def test_times_outside_are_told(t: float) -> None:
    t_B = torch.tensor([0.5, t])
    for field in (VelocityField(Recorder(), Flow("cosine", "noise")), MatchedRouter(Recorder(), "ddpm")):
        with pytest.raises(SamplingError, match="outside"):
            field(torch.ones(2, 1, 1, 3), t_B, torch.arange(2))


def test_matched_points_have_the_snr_and_the_scale() -> None:
    t_B = torch.linspace(0, 1, 101, dtype=torch.float64)
    noise_BD = torch.randn(101, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for path in PATHS:
        x_BD, time_B = at_matched_snr(Flow(path), noise_BD, t_B)
        assert x_BD.isfinite().all() and (time_B.diff() > 0).all()
        inside = slice(1, 100)
        torch.testing.assert_close(
            PATHS[path].log_snr(time_B)[inside], PATHS["linear"].log_snr(t_B)[inside], rtol=1e-10, atol=1e-10
        )
        ratio_B = PATHS[path].alpha(time_B) / (1 - t_B)
        torch.testing.assert_close(x_BD[:100], ratio_B[:100, None] * noise_BD[:100], rtol=1e-9, atol=0)
    assert torch.equal(x_BD[[0, -1]], noise_BD[[0, -1]])


@settings(deadline=None, max_examples=40)
@given(mixture=mixtures(), seed=st.integers(0, 2**32), data=st.data())
def test_experts_and_a_router_of_different_paths_mix_to_the_exact_field(mixture, seed: int, data) -> None:
    """sum_k p_k u_k = u with each expert on a path and prediction of its own, and the router on yet another."""
    x_BCHW = as_images(mixture.points(seed, len(T_B), T_B))
    path = data.draw(st.sampled_from(sorted(PATHS)))
    logits_BK = MatchedRouter(ExactRouter(mixture, path), path)(x_BCHW, T_B, NO_CONDITION)
    right_BK = mixture.log_joint(x_BCHW.flatten(1), 1 - T_B, T_B)
    torch.testing.assert_close(logits_BK.softmax(1), right_BK.softmax(1), atol=1e-9, rtol=0)
    velocities = []
    for k in range(len(mixture.weight_K)):
        of = data.draw(st.sampled_from(PAIRS))
        velocities.append(velocity_field(ExactNetwork(mixture.of(k), of), of)(x_BCHW, T_B, NO_CONDITION))
    mixed = torch.einsum("bk,kbchw->bchw", logits_BK.softmax(1), torch.stack(velocities))
    right = as_images(mixture.linear_velocity(x_BCHW.flatten(1), T_B))
    size = 1 + max(part.abs().max() for part in velocities)
    assert (mixed - right).abs().max() < 1e-8 * size


@pytest.mark.parametrize("strategy", ["once", "full", "top-1"])
def test_images_of_experts_of_different_flows_are_those_of_velocities(strategy: str) -> None:
    """Up to what the documented ends of noise, data and score predictions leave over."""
    mixture, count = PathMixture.random(7, 4, 3, (0.4, 1.0)), 4
    info = MixtureInfo(count, (1, 1, 3), 0, mixture.weight_K[None], dtype=torch.float64)
    flows = [Flow("cosine", "noise"), Flow(), Flow("ddpm", "velocity"), Flow("linear", "data")]
    usual = [ExactNetwork(mixture.of(k), Flow()) for k in range(count)]
    mixed = [velocity_field(ExactNetwork(mixture.of(k), of), of) for k, of in enumerate(flows)]
    router = MatchedRouter(ExactRouter(mixture, "cosine"), "cosine")
    settings = SamplingSettings(steps=12, strategy=strategy, solver="heun")
    request = SampleRequest(tuple(range(32)), torch.zeros(32, dtype=torch.int64), settings)
    right, actual = (driver.sample(request, info, experts, router) for experts in (usual, mixed))
    assert right.experts_SB.unique().tolist() == [0, 1, 2, 3]
    assert (actual.images_BCHW - right.images_BCHW).abs().max() < 0.03
    if strategy == "once":
        return
    x_BCHW = as_images(mixture.points(3, 32, torch.full((32,), 0.4, dtype=torch.float64)))
    right_BCHW, actual_BCHW = (
        driver.mixture_velocity(x_BCHW, 0.4, request.condition, info, each, router, settings=settings)
        for each in (usual, mixed)
    )
    torch.testing.assert_close(actual_BCHW, right_BCHW, rtol=0, atol=1e-9)


@pytest.mark.parametrize("own", PAIRS, ids=str)
def test_an_expert_of_any_flow_predicts_as_one_of_another(own: Flow) -> None:
    """What a student learns from it, on the student's path."""
    mixture = PathMixture.random(3, 4, 5, (0.2, 0.8))
    for students in PAIRS:
        x_BCHW, t_B = at_matched_snr(Flow(students.path), as_images(mixture.points(1, len(T_B), T_B)), T_B)
        right = ExactNetwork(mixture, students)(x_BCHW, t_B)
        actual = as_prediction(ExactNetwork(mixture, own), own, students)(x_BCHW, t_B, NO_CONDITION)
        torch.testing.assert_close(actual, right, rtol=1e-7, atol=1e-7)
    network = ExactNetwork(mixture, own)
    assert as_prediction(network, own, own) is network


@pytest.mark.parametrize("path", sorted(PATHS))
def test_a_router_is_asked_at_the_very_ends_of_its_path(path: str) -> None:
    """Its posterior needs no division, so nothing keeps it from pure noise, where it is the prior."""
    mixture, last = PathMixture.random(0, 4, 3), 0.9936 if path == "ddpm" else 1.0
    t_B = torch.tensor([1e-5, 1e-3, 0.01, 0.985, 0.99, 0.9936, 0.999, 1.0], dtype=torch.float64).clamp(max=last)
    x_BD = mixture.points(1, len(t_B), t_B)
    logits_BK = MatchedRouter(ExactRouter(mixture, path), path)(as_images(x_BD), t_B, NO_CONDITION[: len(t_B)])
    right_BK = mixture.log_joint(x_BD, 1 - t_B, t_B).softmax(1)
    torch.testing.assert_close(logits_BK.softmax(1), right_BK, atol=1e-6, rtol=0)
    if last == 1:
        torch.testing.assert_close(logits_BK[-1].softmax(0), mixture.weight_K, atol=1e-9, rtol=0)


@settings(deadline=None, max_examples=40)
@given(mixture=mixtures(), seed=st.integers(0, 2**32), path=st.sampled_from(sorted(PATHS)))
def test_scores_mix_as_velocities_do(mixture, seed: int, path: str) -> None:
    """sum_k p_k s_k = s on every path (the paper's appendix); s by differentiating the closed-form density."""
    alpha_B, sigma_B = PATHS[path].alpha(T_B), PATHS[path].sigma(T_B)
    x_BD = mixture.points(seed, len(T_B), T_B).requires_grad_()
    log_joint_BK = mixture.log_joint(x_BD, alpha_B, sigma_B)
    (right,) = torch.autograd.grad(log_joint_BK.logsumexp(1).sum(), x_BD)
    of, x = Flow(path, "score"), x_BD.detach()
    parts = [ExactNetwork(mixture.of(k), of)(as_images(x), T_B).flatten(1) for k in range(len(mixture.weight_K))]
    mixed = torch.einsum("bk,kbd->bd", log_joint_BK.detach().softmax(1), torch.stack(parts))
    assert (mixed - right).abs().max() < 1e-11 * (1 + max(part.abs().max() for part in parts))


class Recorder(torch.nn.Module):
    def forward(self, x_BCHW, t_B, condition):
        self.seen = (x_BCHW, t_B, condition)
        return torch.zeros_like(x_BCHW)


def test_a_linear_velocity_is_left_alone_and_dtypes_are_kept() -> None:
    network = Recorder()
    assert velocity_field(network, Flow()) is network
    x_BCHW, t_B, label_B = torch.ones(2, 1, 1, 3, dtype=torch.bfloat16), torch.tensor([0.001, 0.7]), torch.arange(2)
    actual = velocity_field(network, Flow("cosine", "noise"))(x_BCHW, t_B, label_B)
    x_seen, t_seen, condition = network.seen
    assert actual.dtype == x_seen.dtype == torch.bfloat16
    # Times in bfloat16 would be off by up to .4 %.
    assert t_seen.dtype == torch.float32
    assert condition is label_B
