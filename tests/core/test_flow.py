import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddm_ray.core import flow
from ddm_ray.core.flow import PATHS, PREDICTIONS, Flow
from ddm_ray.errors import ConfigError
from tests.core.oracles import check_path
from tests.core.paths_closed_form import PAIRS

TIMES = torch.linspace(0.0005, 0.9995, 1999, dtype=torch.float64)
ENDPOINTS = torch.tensor([0.0, 1.0], dtype=torch.float64)


def draw(seed: int, rows: int):
    generator = torch.Generator().manual_seed(seed)
    data, noise = torch.randn(2, rows, 2, 3, 3, generator=generator, dtype=torch.float64)
    return data, noise, 1e-3 + 0.998 * torch.rand(rows, generator=generator, dtype=torch.float64)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 5), source=st.sampled_from(PAIRS))
def test_every_prediction_gives_back_both_ends_and_every_other_prediction(seed: int, rows: int, source: Flow) -> None:
    data, noise, t_B = draw(seed, rows)
    x = flow.interpolate(data, noise, t_B, source.path)
    output = flow.target(source, data, noise, t_B)
    # Noise doesn't tell data from x better than 1 / alpha, nor data the noise than 1 / sigma.
    actual_data, actual_noise = flow.to_data_and_noise(source, x, output, t_B)
    torch.testing.assert_close(actual_data, data, atol=1e-10, rtol=0)
    torch.testing.assert_close(actual_noise, noise, atol=1e-10, rtol=0)
    for prediction in PREDICTIONS:
        right = flow.target(Flow(source.path, prediction), data, noise, t_B)
        actual = flow.convert(source, prediction, x, output, t_B)
        torch.testing.assert_close(actual, right, atol=1e-9, rtol=1e-9)
        back = flow.convert(Flow(source.path, prediction), source.prediction, x, actual, t_B)
        torch.testing.assert_close(back, output, atol=1e-8, rtol=1e-8)


def test_known_conversions_of_the_linear_path() -> None:
    data, noise, t_B = draw(0, 4)
    x, v, t = flow.interpolate(data, noise, t_B), noise - data, flow.append_dims(t_B, data)
    torch.testing.assert_close(flow.convert(Flow(), "data", x, v, t_B), x - t * v)
    torch.testing.assert_close(flow.convert(Flow(), "noise", x, v, t_B), x + (1 - t) * v)
    torch.testing.assert_close(flow.convert(Flow(), "score", x, v, t_B), -(x + (1 - t) * v) / t)


@pytest.mark.parametrize("path", PATHS)
def test_slopes_are_the_derivatives_and_velocity_that_of_x(path: str) -> None:
    # Off the knots of ddpm, where its slopes jump.
    t = (TIMES + 2e-4).requires_grad_()
    of = PATHS[path]
    for value, slope in ((of.alpha, of.alpha_slope), (of.sigma, of.sigma_slope)):
        (derivative,) = torch.autograd.grad(value(t).sum(), t)
        torch.testing.assert_close(slope(t.detach()), derivative, rtol=1e-10, atol=1e-12)
    data, noise, _ = draw(1, 3)
    t_B = torch.tensor([0.1234, 0.5678, 0.9012], dtype=torch.float64)
    ahead, behind = (flow.interpolate(data, noise, t_B + step, path) for step in (1e-5, -1e-5))
    right = flow.target(Flow(path), data, noise, t_B)
    torch.testing.assert_close((ahead - behind) / 2e-5, right, atol=1e-6, rtol=0)


def test_the_paths_are_those_of_the_field() -> None:
    linear, cosine = PATHS["linear"], PATHS["cosine"]
    torch.testing.assert_close(linear.alpha(TIMES) + linear.sigma(TIMES), torch.ones_like(TIMES))
    torch.testing.assert_close(cosine.alpha(TIMES), torch.cos(math.pi / 2 * TIMES))
    torch.testing.assert_close(cosine.sigma(TIMES), torch.sin(math.pi / 2 * TIMES))
    alpha_bar = torch.from_numpy(np.cumprod(1 - np.linspace(1e-4, 0.02, 1000)))
    steps = torch.arange(1, 1001, dtype=torch.float64) / 1000
    torch.testing.assert_close(PATHS["ddpm"].alpha(steps), alpha_bar.sqrt(), rtol=1e-12, atol=0)
    torch.testing.assert_close(PATHS["ddpm"].sigma(steps), (1 - alpha_bar).sqrt(), rtol=1e-11, atol=0)
    assert abs(float(PATHS["ddpm"].alpha(steps[-1:])) - 0.00635) < 5e-6
    # No cancellation where sigma is small, in float32 neither.
    early = torch.tensor([1e-7, 1e-5])
    torch.testing.assert_close(PATHS["ddpm"].sigma(early), (early * 0.1 * 1.00005).sqrt(), rtol=1e-5, atol=0)


def test_ddpms_slopes_at_a_step_are_those_of_the_beta_that_led_to_it() -> None:
    ddpm = PATHS["ddpm"]
    step = torch.tensor([125.0, 500.0, 1000.0], dtype=torch.float64)
    log_rate = 1000 * torch.log1p(-(1e-4 + (0.02 - 1e-4) * (step - 1) / 999))
    torch.testing.assert_close(ddpm.alpha_slope(step / 1000), ddpm.alpha(step / 1000) * log_rate / 2)


@pytest.mark.parametrize("path", PATHS)
def test_time_of_inverts_the_log_snr_which_falls_from_one_end_to_the_other(path: str) -> None:
    of = PATHS[path]
    log_snr = of.log_snr(TIMES)
    assert (log_snr.diff() < 0).all()
    torch.testing.assert_close(of.time_of(log_snr), TIMES, atol=1e-12, rtol=0)
    torch.testing.assert_close(log_snr, 2 * (of.alpha(TIMES) / of.sigma(TIMES)).log())
    first, last = of.log_snr(ENDPOINTS).tolist()
    assert first == math.inf
    assert last == -math.inf or path == "ddpm"
    infinite = torch.tensor([math.inf, -math.inf], dtype=torch.float64)
    assert of.time_of(infinite).tolist() == [0, 1]
    assert of.time_of(torch.tensor([[500.0], [-500.0]])).shape == (2, 1)
    assert 0 <= of.time_of(torch.tensor(500.0)) < 1e-6 and of.time_of(torch.tensor(-500.0)) == 1


@pytest.mark.parametrize("of", PAIRS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_conversions_are_defined_at_both_ends(of: Flow, dtype: torch.dtype) -> None:
    data, noise = (part.to(dtype) for part in draw(2, 2)[:2])
    x = flow.interpolate(data, noise, ENDPOINTS, of.path)
    torch.testing.assert_close(x[0], data[0], atol=0, rtol=0)
    for output in (flow.target(of, data, noise, ENDPOINTS), noise):
        for actual in flow.to_data_and_noise(of, x, output, ENDPOINTS):
            assert actual.isfinite().all() and actual.dtype == dtype
    # Near an end that isn't regular, all is that of the regular time next to it.
    regular = of.clamp_to_nonsingular(ENDPOINTS)
    torch.testing.assert_close(flow.target(of, data, noise, ENDPOINTS), flow.target(of, data, noise, regular))
    log_snr = PATHS[of.path].log_snr(regular)
    singular = {"velocity": "", "noise": "1", "data": "0", "score": "01"}[of.prediction]
    assert ("0" in singular) == bool(log_snr[0] < 14)
    assert ("1" in singular and of.path != "ddpm") == bool(-14 < log_snr[1] < -13)
    inside = torch.tensor([0.002, 0.5, 0.998], dtype=torch.float64)
    assert torch.equal(of.clamp_to_nonsingular(inside), inside)


def test_zero_is_data_one_is_noise_and_velocity_is_the_derivative() -> None:
    check_path()
    data, noise, _ = draw(0, 3)
    for path in ("linear", "cosine"):
        torch.testing.assert_close(flow.interpolate(data, noise, torch.ones(3), path), noise, atol=0, rtol=0)
    torch.testing.assert_close(flow.target(Flow(), data, noise, torch.rand(3)), flow.velocity(data, noise))


def test_float32_conversions_are_close_to_float64() -> None:
    data, noise, _ = draw(3, 4)
    t_B = torch.tensor([0.02, 0.3, 0.7, 0.98], dtype=torch.float64)
    for of in PAIRS:
        x = flow.interpolate(data.float(), noise.float(), t_B, of.path)
        actual = flow.to_data_and_noise(of, x, flow.target(of, data.float(), noise.float(), t_B), t_B)
        for part, right in zip(actual, (data, noise), strict=True):
            torch.testing.assert_close(part.double(), right, atol=1e-3, rtol=0)


@pytest.mark.parametrize("names", [{"path": "cosin"}, {"prediction": "epsilon"}])
def test_unknown_names_are_told(names: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"unknown (path 'cosin'.*ddpm|prediction 'epsilon'.*score)"):
        Flow(**names)


def test_gaussian_slope_is_the_regression_of_velocity_on_x() -> None:
    generator = torch.Generator().manual_seed(0)
    data, noise = torch.randn(2, 200_000, generator=generator, dtype=torch.float64)
    data = 0.5 * data
    for t in (0.0, 0.2, 0.7, 1.0):
        x = flow.interpolate(data, noise, torch.full((len(data),), t))
        slope = (x * flow.velocity(data, noise)).mean() / x.square().mean()
        assert abs(slope - flow.gaussian_velocity_slope(torch.tensor(t), 0.5)) < 0.02
