import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddm_ray.core import flow
from ddm_ray.core.flow import PATHS, Flow
from ddm_ray.core.matching import MatchedRouter, VelocityField, matched, velocity_field
from ddm_ray.errors import TimeError
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
    found = VelocityField(ExactNetwork(mixture, of), of)(as_images(x_BD), T_B, NO_CONDITION).flatten(1)
    # By x too, since a velocity may be all but 0 where its parts aren't.
    size_B = right.norm(dim=1) + x_BD.norm(dim=1) + mixture.mean_KD.norm(dim=1).max()
    assert ((found - right).norm(dim=1) / size_B).max() < 1e-9


@pytest.mark.parametrize("of", PAIRS, ids=str)
def test_relative_to_the_velocity_alone_and_conversion_without_matching_is_noticed(of: Flow) -> None:
    mixture = PathMixture.random(3, 4, 5, (0.2, 0.8))
    x_BD = mixture.points(1, len(T_B), T_B)
    right = as_images(mixture.linear_velocity(x_BD, T_B))
    network = ExactNetwork(mixture, of)
    assert relative(velocity_field(network, of)(as_images(x_BD), T_B, NO_CONDITION), right) < 1e-9
    data, noise = flow.ends(of, as_images(x_BD), network(as_images(x_BD), T_B), T_B)
    if of.path == "linear":
        assert relative(noise - data, right) < 1e-9
    else:
        off_B = (noise - data - right).flatten(1).norm(dim=1) / right.flatten(1).norm(dim=1)
        assert off_B[2:-2].min() > 0.05
        at_t = ExactNetwork(mixture, of)(as_images(x_BD), matched(of, x_BD, T_B)[1])
        data, noise = flow.ends(of, as_images(x_BD), at_t, matched(of, x_BD, T_B)[1])
        assert relative((noise - data)[2:-2], right[2:-2]) > 0.05


@pytest.mark.parametrize("of", PAIRS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_ends_are_finite_and_close(of: Flow, dtype: torch.dtype) -> None:
    mixture = PathMixture.random(5, 3, 4, (0.3, 0.8))
    t_B = torch.tensor([0.0, 1e-6, 1e-3, 0.995, 0.9999, 1.0], dtype=torch.float64)
    x_BD = mixture.points(2, len(t_B), t_B)
    right = as_images(mixture.linear_velocity(x_BD, t_B))
    network = ExactNetwork(mixture, of)
    found = VelocityField(network, of)(as_images(x_BD).to(dtype), t_B.to(dtype), NO_CONDITION)
    assert found.dtype == dtype
    # Of the order of the last alpha or sigma that the network is asked at: .02, and .006 at ddpm's own end.
    near_data = 4e-2 if of.prediction in ("data", "score") else 1e-2
    near_noise = 6e-2 if of.prediction in ("noise", "score") else 2e-2 if of.path == "ddpm" else 5e-3
    assert relative(found.double()[:3], right[:3]) < near_data
    if of.prediction == "data":
        matched_BCHW, matched_B = matched(of, as_images(x_BD), t_B)
        ends = as_images(x_BD) - flow.along_batch(t_B, right) * found.double()
        assert relative(ends[3:], network(matched_BCHW, matched_B)[3:]) < 1e-5
    assert relative(found.double()[3:], right[3:]) < near_noise


@pytest.mark.parametrize("of", [pair for pair in PAIRS if pair.prediction in ("noise", "score")], ids=str)
def test_a_networks_small_error_stays_small_at_pure_noise(of: Flow) -> None:
    """Data are found by dividing by alpha, which is .02 at the last time that the network is asked at."""
    mixture, eps = PathMixture.random(5, 3, 4, (0.3, 0.8)), 0.01
    x_BD, t_B = mixture.points(2, 3, torch.ones(3, dtype=torch.float64)), torch.ones(3, dtype=torch.float64)
    exact = ExactNetwork(mixture, of)

    def off(*inputs):
        return exact(*inputs) + eps

    right, found = (VelocityField(network, of)(as_images(x_BD), t_B, NO_CONDITION[:3]) for network in (exact, off))
    # A score's error counts times sigma, all but 1 here.
    assert 10 * eps < (found - right).abs().max() < 51 * eps


@pytest.mark.parametrize("t", [-1e-3, 1.001, float("nan")])
def test_times_outside_are_told(t: float) -> None:
    t_B = torch.tensor([0.5, t])
    for field in (VelocityField(Recorder(), Flow("cosine", "noise")), MatchedRouter(Recorder(), "ddpm")):
        with pytest.raises(TimeError, match="outside"):
            field(torch.ones(2, 1, 1, 3), t_B, torch.arange(2))


def test_matched_points_have_the_snr_and_the_scale() -> None:
    t_B = torch.linspace(0, 1, 101, dtype=torch.float64)
    noise_BD = torch.randn(101, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for path in PATHS:
        x_BD, time_B = matched(Flow(path), noise_BD, t_B)
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
    found = velocity_field(network, Flow("cosine", "noise"))(x_BCHW, t_B, label_B)
    x_seen, t_seen, condition = network.seen
    assert found.dtype == x_seen.dtype == torch.bfloat16
    # Times in bfloat16 would be off by up to .4 %.
    assert t_seen.dtype == torch.float32
    assert condition is label_B
