import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddm_ray.core import flow
from tests.core.oracles import check_path


def draw(seed: int, rows: int):
    generator = torch.Generator().manual_seed(seed)
    data, noise = torch.randn(2, rows, 2, 3, 3, generator=generator, dtype=torch.float64)
    return data, noise, torch.rand(rows, generator=generator, dtype=torch.float64)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 5))
def test_velocity_gives_back_both_ends(seed: int, rows: int) -> None:
    data, noise, t_B = draw(seed, rows)
    x, v = flow.interpolate(data, noise, t_B), flow.velocity(data, noise)
    torch.testing.assert_close(flow.data_from_velocity(x, v, t_B), data, atol=1e-13, rtol=0)
    torch.testing.assert_close(flow.noise_from_velocity(x, v, t_B), noise, atol=1e-13, rtol=0)


def test_zero_is_data_one_is_noise_and_velocity_is_the_derivative() -> None:
    check_path()
    data, noise, _ = draw(0, 3)
    torch.testing.assert_close(flow.interpolate(data, noise, torch.ones(3)), noise, atol=0, rtol=0)


def test_dtype_of_the_data_is_kept() -> None:
    data, noise, t_B = draw(0, 3)
    assert flow.interpolate(data.float(), noise.float(), t_B).dtype == torch.float32


def test_gaussian_slope_is_the_regression_of_velocity_on_x() -> None:
    generator = torch.Generator().manual_seed(0)
    data, noise = torch.randn(2, 200_000, generator=generator, dtype=torch.float64)
    data = 0.5 * data
    for t in (0.0, 0.2, 0.7, 1.0):
        x = flow.interpolate(data, noise, torch.full((len(data),), t))
        slope = (x * flow.velocity(data, noise)).mean() / x.square().mean()
        assert abs(slope - flow.gaussian_velocity_slope(torch.tensor(t), 0.5)) < 0.02
