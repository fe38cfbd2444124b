import inspect

import pytest
import torch

from ddm_ray.core.flow import gaussian_velocity_slope
from ddm_ray.errors import ConfigError
from ddm_ray.models.dit import DiT, Trunk, time_features

SIZE = {
    "image_size": 8,
    "channels": 2,
    "num_classes": 3,
    "patch_size": 2,
    "width": 16,
    "depth": 2,
    "heads": 4,
}


def inputs(rows: int = 5, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    x_BCHW = torch.randn(rows, 2, 8, 8, generator=generator)
    return x_BCHW, torch.rand(rows, generator=generator), torch.arange(rows) % 4


def briefly_trained(steps: int = 30, **sizes) -> DiT:
    """A DiT fitted for a moment to brightness that grows from top left to bottom right."""
    torch.manual_seed(0)
    model = DiT(**{**SIZE, **sizes})
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    target = torch.linspace(-1, 1, 64).view(1, 1, 8, 8).expand(16, 2, 8, 8)
    for step in range(steps):
        x_BCHW, t_B, label_B = inputs(16, seed=step)
        loss = (model(x_BCHW, t_B, label_B) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def test_velocity_has_the_shape_of_x_for_every_label_and_the_null_one() -> None:
    model = briefly_trained(steps=3)
    x_BCHW, t_B, label_B = inputs()
    assert model(x_BCHW, t_B, label_B).shape == x_BCHW.shape
    per_label = [model(x_BCHW, t_B, torch.full((5,), label)) for label in range(4)]
    assert all(not torch.equal(per_label[3], other) for other in per_label[:3])
    with pytest.raises(IndexError):
        model(x_BCHW, t_B, torch.full((5,), 4))


@pytest.mark.parametrize("form", [{}, {"num_classes": None, "text_dim": 5, "adaln": "single"}])
def test_config_is_every_argument_of_the_constructor(form: dict) -> None:
    model = DiT(**{**SIZE, **form}, analytic_skip=0.5)
    assert model.config.keys() == {*inspect.signature(Trunk).parameters, "analytic_skip"}
    assert model.config == {"mlp_ratio": 4.0, "adaln": "zero", "text_dim": None, "analytic_skip": 0.5, **SIZE, **form}


def test_analytic_skip_is_the_velocity_of_a_gaussian_at_initialisation() -> None:
    x_BCHW, _, label_B = inputs()
    t_B = torch.tensor([0.0, 0.1, 0.5, 0.9, 1.0])
    slope = gaussian_velocity_slope(t_B, 0.5).view(-1, 1, 1, 1)
    velocity_BCHW = DiT(**SIZE, analytic_skip=0.5)(x_BCHW, t_B, label_B)
    torch.testing.assert_close(velocity_BCHW, slope * x_BCHW)
    torch.testing.assert_close(velocity_BCHW[0], -x_BCHW[0])
    torch.testing.assert_close(velocity_BCHW[-1], x_BCHW[-1])


def test_a_briefly_trained_network_knows_where_a_patch_is() -> None:
    model = briefly_trained()
    x_BCHW, t_B, label_B = inputs()
    rolled = model(x_BCHW.roll((2, 2), dims=(2, 3)), t_B, label_B)
    difference = (rolled - model(x_BCHW, t_B, label_B).roll((2, 2), dims=(2, 3))).abs().mean()
    assert difference > 0.1 * rolled.abs().mean()
    # The control: without positions, a patch moved is an output moved.
    model.trunk.positions_1ND.zero_()
    rolled = model(x_BCHW.roll((2, 2), dims=(2, 3)), t_B, label_B)
    still = model(x_BCHW, t_B, label_B).roll((2, 2), dims=(2, 3))
    torch.testing.assert_close(rolled, still, atol=1e-5, rtol=1e-4)


def test_a_patch_lands_where_it_came_from() -> None:
    model = briefly_trained(steps=3)
    for block in model.trunk.blocks:
        block.modulation.weight.data.zero_()
        block.modulation.bias.data.zero_()
    x_BCHW, t_B, label_B = inputs()
    changed = x_BCHW.clone()
    changed[:, :, 2:4, 6:8] += 1
    moved = (model(changed, t_B, label_B) - model(x_BCHW, t_B, label_B)).abs().amax(dim=(0, 1)) > 0
    assert moved[2:4, 6:8].all()
    assert moved.sum() == 4


def test_times_given_in_bfloat16_are_rounded_no_further() -> None:
    t_B = torch.rand(50, generator=torch.Generator().manual_seed(0)).bfloat16()
    features = time_features(t_B)
    assert features.dtype == torch.float32
    torch.testing.assert_close(features.double(), time_features(t_B.double()), atol=2e-4, rtol=0)


@pytest.mark.parametrize("change", [{"patch_size": 3}, {"heads": 3}, {"width": 18, "heads": 2}, {"analytic_skip": 0.0}])
def test_sizes_that_do_not_fit_are_refused(change: dict) -> None:
    with pytest.raises(ConfigError):
        DiT(**{**SIZE, **change})
