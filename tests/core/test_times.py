import math

import numpy as np
import pytest
import scipy.stats
import torch

from ddm_ray.core.flow import PATHS
from ddm_ray.core.times import TimeSampling, shifted, time_grid

UNIFORM = np.random.default_rng(0).random(20_000)


def test_uniform_times_are_the_uniforms_bit_for_bit() -> None:
    uniform_B = UNIFORM.astype(np.float32)
    t_B = TimeSampling().times(uniform_B)
    assert t_B.dtype == torch.float32
    assert torch.equal(t_B, torch.from_numpy(uniform_B))


@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (-0.6, 0.7), (1.2, 2.0)])
def test_logit_normal_times_are_the_quantiles(mean: float, std: float) -> None:
    t_B = TimeSampling("logit-normal", mean=mean, std=std).times(UNIFORM).double().numpy()
    np.testing.assert_allclose(t_B, scipy.special.expit(scipy.stats.norm(mean, std).ppf(UNIFORM)), rtol=1e-6)
    assert scipy.stats.kstest(scipy.special.logit(t_B), scipy.stats.norm(mean, std).cdf).pvalue > 1e-3
    histogram, edges = np.histogram(t_B, 20, (0, 1))
    with np.errstate(divide="ignore"):
        expected = len(t_B) * np.diff(scipy.stats.norm(mean, std).cdf(scipy.special.logit(edges)))
    assert (np.abs(histogram - expected) < 5 * np.sqrt(expected) + 1).all()


def test_discrete_times_are_each_as_likely_and_none_is_zero() -> None:
    t_B = TimeSampling("discrete", num_times=8).times(UNIFORM)
    values, counts = t_B.unique(return_counts=True)
    assert values.tolist() == [n / 8 for n in range(1, 9)]
    assert (counts / len(t_B) - 1 / 8).abs().max() < 0.01
    edges = np.array([0, 0.125, np.nextafter(1, 0)])
    assert TimeSampling("discrete", num_times=8).times(edges).tolist() == [0.125, 0.25, 1]


@pytest.mark.parametrize("kind", ["uniform", "logit-normal", "discrete"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shift", [0.3, 1.0, 3.0])
def test_the_least_and_the_largest_uniforms_give_finite_times_in_order(kind: str, path: str, shift: float) -> None:
    for dtype in (np.float32, np.float64):
        uniform_B = np.array([0, 2**-24, 0.5, np.nextafter(dtype(1), dtype(0))], dtype)
        t_B = TimeSampling(kind, shift=shift).times(uniform_B, path)
        assert t_B.dtype == torch.float32
        assert (t_B >= 0).all() and (t_B <= 1).all() and (t_B.diff() >= 0).all() and t_B[3] > t_B[2] > t_B[0]


@pytest.mark.parametrize("shift", [0.25, 2.0, 3.0])
def test_the_shift_is_sd3s_on_the_linear_path_and_lowers_the_log_snr_on_all(shift: float) -> None:
    t_B = torch.linspace(0, 1, 101, dtype=torch.float64)
    linear = PATHS["linear"]
    torch.testing.assert_close(shifted(t_B, shift), shift * t_B / (1 + (shift - 1) * t_B))
    torch.testing.assert_close(shifted(t_B, shift), linear.time_of(linear.log_snr(t_B) - 2 * math.log(shift)))
    for path, of in PATHS.items():
        inside = t_B[1:60]
        lowered = of.log_snr(inside) - of.log_snr(shifted(inside, shift, path))
        torch.testing.assert_close(lowered, torch.full_like(lowered, 2 * math.log(shift)))
        assert shifted(t_B, shift, path)[0] == 0
        assert shifted(t_B, shift, path)[-1] == 1 or (path == "ddpm" and shift < 1)
    sampled = TimeSampling("logit-normal", shift=shift).times(UNIFORM)
    assert abs(float(sampled.logit().mean()) - math.log(shift)) < 0.03


@pytest.mark.parametrize("name", ["uniform", "cosine", "shifted-3", "shifted-0.1", "shifted-1", "shifted-1.73"])
@pytest.mark.parametrize("steps", [1, 2, 7, 50, 1000])
def test_grids_fall_from_exactly_one_to_exactly_zero(name: str, steps: int) -> None:
    times = time_grid(name, steps)
    assert times.dtype == torch.float64
    assert len(times) == steps + 1
    assert times[0] == 1 and times[-1] == 0 and (times.diff() < 0).all()


def test_grids_in_closed_form() -> None:
    uniform = torch.tensor([1, 0.75, 0.5, 0.25, 0], dtype=torch.float64)
    torch.testing.assert_close(time_grid("uniform", 4), uniform)
    sine, cosine = (math.pi / 2 * uniform).sin(), (math.pi / 2 * uniform).cos()
    torch.testing.assert_close(time_grid("cosine", 4), sine / (sine + cosine))
    torch.testing.assert_close(time_grid("shifted-3", 4), 3 * uniform / (1 + 2 * uniform))
    assert torch.equal(time_grid("shifted-1", 4), uniform)


@pytest.mark.parametrize("name", ["karras", "shifted", "shifted-0", "shifted--3", "shifted-3x", "Uniform", ""])
def test_unknown_grids_are_told(name: str) -> None:
    with pytest.raises(ValueError, match="use uniform, cosine or shifted-S"):
        time_grid(name, 4)
