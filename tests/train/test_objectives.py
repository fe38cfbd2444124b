"""Objectives on data whose exact predictions are known: what minimises each loss is the mean given x_t."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ddm_ray.core.condition import Condition
from ddm_ray.core.flow import PATHS, Flow
from ddm_ray.core.streams import BATCH, stream
from ddm_ray.core.times import TimeSampling
from ddm_ray.train.objectives import Batch, ExpertLoss, RouterLoss, draw_batch
from tests.core.paths_closed_form import PAIRS, ExactNetwork, ExactRouter, PathMixture

# Two points in one dimension; a width of 0 would divide 0 by 0 at t = 0.
POINTS = PathMixture(
    torch.tensor([0.3, 0.7], dtype=torch.float64),
    torch.tensor([[-1.0], [0.8]], dtype=torch.float64),
    torch.tensor([1e-3, 1e-3], dtype=torch.float64),
)


class Recorded(nn.Module):
    """Answers what it is told and keeps what it saw."""

    def __init__(self, answer: Tensor) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, x_BCHW: Tensor, t_B: Tensor, condition: Condition) -> Tensor:
        self.seen = (x_BCHW, t_B, condition)
        return self.answer


class Perturbed(nn.Module):
    """The exact network of the flow, plus `offset` plus `slope` times x."""

    def __init__(self, flow: Flow) -> None:
        super().__init__()
        self.exact = ExactNetwork(POINTS, flow)
        self.offset = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.slope = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x_BCHW: Tensor, t_B: Tensor, condition: Condition) -> Tensor:
        return self.exact(x_BCHW, t_B) + self.offset + self.slope * x_BCHW


def random_batch(seed: int, rows: int = 6, dtype: torch.dtype = torch.float64) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    data, noise = torch.randn(2, rows, 2, 3, 3, generator=generator, dtype=dtype)
    t_B = torch.rand(rows, generator=generator, dtype=dtype)
    return Batch(data, noise, t_B, torch.arange(rows), torch.arange(rows) % 3)


def quadrature(t: float, nodes: int = 200) -> tuple[Batch, Tensor]:
    """The two points with Gauss-Hermite noise at one t: a batch, and the weight of each of its rows."""
    noise_N, weight_N = np.polynomial.hermite_e.hermegauss(nodes)
    data_B = POINTS.mean_KD[:, 0].repeat_interleave(nodes)
    noise_B = torch.from_numpy(noise_N).repeat(2)
    weight_B = (POINTS.weight_K[:, None] * torch.from_numpy(weight_N / weight_N.sum())).flatten()
    t_B = torch.full_like(data_B, t)
    as_images = (data_B.view(-1, 1, 1, 1), noise_B.view(-1, 1, 1, 1))
    return Batch(*as_images, t_B, torch.zeros(2 * nodes), torch.arange(2).repeat_interleave(nodes)), weight_B


@pytest.mark.parametrize("flow", PAIRS, ids=str)
@pytest.mark.parametrize("t", [0.3, 0.6, 0.9])
def test_the_mean_given_x_is_where_the_gradient_is_zero_and_the_loss_least(flow: Flow, t: float) -> None:
    batch, weight_B = quadrature(t)
    model = Perturbed(flow)
    loss = (ExpertLoss(flow)(model, batch) * weight_B).sum()
    loss.backward()
    gradients = [float(parameter.grad) for parameter in model.parameters()]
    # The points' own width of .001 is left out of the quadrature.
    assert np.abs(gradients).max() < 1e-4
    for parameter in model.parameters():
        for step in (-0.1, 0.1):
            with torch.no_grad():
                parameter.fill_(step)
                perturbed = (ExpertLoss(flow)(model, batch) * weight_B).sum()
                parameter.zero_()
            assert perturbed > loss + 1e-4


@pytest.mark.parametrize("path", PATHS)
def test_the_posterior_is_what_minimises_the_routers_loss(path: str) -> None:
    batch, weight_B = quadrature(0.7)
    exact = ExactRouter(POINTS, path)
    bias_K = torch.zeros(2, dtype=torch.float64, requires_grad=True)

    class Scaled(nn.Module):
        def forward(self, x_BCHW: Tensor, t_B: Tensor, condition: Condition) -> Tensor:
            return exact(x_BCHW, t_B) * scale + bias_K

    def losses(factor: float) -> Tensor:
        nonlocal scale
        scale = factor
        return (RouterLoss(Flow(path))(Scaled(), batch) * weight_B).sum()

    scale = 1.0
    least = losses(1.0)
    least.backward()
    assert bias_K.grad.abs().max() < 1e-4
    assert losses(0.7) > least + 1e-4 and losses(1.4) > least + 1e-4


@pytest.mark.parametrize("flow", PAIRS, ids=str)
def test_the_network_is_asked_on_the_flows_path_and_its_prediction_is_what_counts(flow: Flow) -> None:
    batch, path = random_batch(0), PATHS[flow.path]
    alpha, sigma, alpha_slope, sigma_slope = (
        of(batch.t_B).view(-1, 1, 1, 1) for of in (path.alpha, path.sigma, path.alpha_slope, path.sigma_slope)
    )
    right = {
        "velocity": alpha_slope * batch.data_BCHW + sigma_slope * batch.noise_BCHW,
        "noise": batch.noise_BCHW,
        "data": batch.data_BCHW,
        "score": -batch.noise_BCHW / sigma,
    }[flow.prediction]
    model = Recorded(right)
    assert ExpertLoss(flow)(model, batch).max() < 1e-20
    x_BCHW, t_B, condition = model.seen
    torch.testing.assert_close(x_BCHW, alpha * batch.data_BCHW + sigma * batch.noise_BCHW)
    assert t_B is batch.t_B and condition is batch.condition
    weight_B = sigma.flatten() ** 2 if flow.prediction == "score" else torch.ones(6, dtype=torch.float64)
    torch.testing.assert_close(ExpertLoss(flow)(Recorded(right + 3), batch), 9 * weight_B)


@pytest.mark.parametrize("flow", PAIRS, ids=str)
@pytest.mark.parametrize("t", [0.0, 1.0])
def test_losses_and_their_gradients_are_finite_at_both_ends(flow: Flow, t: float) -> None:
    batch = random_batch(1, dtype=torch.float32)
    batch = Batch(batch.data_BCHW, batch.noise_BCHW, torch.full((6,), t), batch.condition, batch.cluster_B)
    answer = torch.full_like(batch.data_BCHW, 0.5, requires_grad=True)
    loss_B = ExpertLoss(flow)(Recorded(answer), batch)
    loss_B.sum().backward()
    assert loss_B.isfinite().all() and answer.grad.isfinite().all()
    if flow.prediction == "score" and t == 0:
        torch.testing.assert_close(loss_B, batch.noise_BCHW.square().flatten(1).mean(1))


def test_linear_velocity_is_flow_matching_bit_for_bit_in_the_datas_precision() -> None:
    batch = random_batch(2, dtype=torch.float32)
    answer = torch.randn_like(batch.data_BCHW).bfloat16()
    model = Recorded(answer)
    loss_B = ExpertLoss(Flow())(model, batch)
    error = answer.float() - (batch.noise_BCHW - batch.data_BCHW)
    assert torch.equal(loss_B, error.square().flatten(1).mean(1))
    t = batch.t_B.view(-1, 1, 1, 1)
    assert torch.equal(model.seen[0], (1 - t) * batch.data_BCHW + t * batch.noise_BCHW)
    assert RouterLoss(Flow())(Recorded(torch.zeros(6, 3).bfloat16()), batch).dtype == torch.float32


def test_draws_keep_their_stream_and_times_are_sampled_from_their_own_uniforms() -> None:
    fields = (7, (2, 1), 5, 64, (1, 2, 2), 0.25)
    numbers = stream(7, BATCH, 2, 1, 5)
    noise = torch.from_numpy(numbers.standard_normal((64, 1, 2, 2), np.float32))
    uniform_B = numbers.random(64, np.float32)
    drop_B = torch.from_numpy(numbers.random(64) < 0.25)
    plain = draw_batch(*fields, TimeSampling(), "linear")
    assert torch.equal(plain.t_B, torch.from_numpy(uniform_B))
    sampling = TimeSampling("logit-normal", mean=-0.5, shift=2.0)
    for path in PATHS:
        drawn = draw_batch(*fields, sampling, path)
        assert torch.equal(drawn.noise_BCHW, noise) and torch.equal(drawn.drop_B, drop_B)
        assert torch.equal(drawn.t_B, sampling.times(uniform_B, path))
    assert not torch.equal(draw_batch(*fields, sampling, "cosine").t_B, draw_batch(*fields, sampling, "linear").t_B)
