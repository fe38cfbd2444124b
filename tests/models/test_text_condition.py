"""Conditions of the networks: labels or texts, with both forms of adaLN."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddm_ray.core.condition import Condition, Text, join
from ddm_ray.errors import ConfigError, SamplingError
from ddm_ray.models.dit import DiT
from ddm_ray.models.router import Router

TEXT_DIM, TOKENS = 6, 5
SIZE = {"image_size": 8, "channels": 2, "patch_size": 2, "width": 16, "depth": 2, "heads": 4}
CLASSES = {"num_classes": 3}
TEXT = {"num_classes": None, "text_dim": TEXT_DIM}
NETWORKS = [DiT, lambda **sizes: Router(num_experts=4, **sizes)]
COMBINATIONS = [(adaln, kind) for adaln in ("zero", "single") for kind in (CLASSES, TEXT)]


def perturbed(network=DiT, spread: float = 0.2, **sizes) -> torch.nn.Module:
    """A network whose gates are open, as training leaves them."""
    torch.manual_seed(0)
    model = network(**{**SIZE, **sizes})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(spread * torch.randn_like(parameter))
    return model.eval()


def inputs(rows: int = 4, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x_BCHW = torch.randn(rows, 2, 8, 8, generator=generator, dtype=dtype)
    return x_BCHW, torch.rand(rows, generator=generator, dtype=dtype)


def texts(rows: int = 4, dtype: torch.dtype = torch.float32) -> Text:
    """Row b has b % TOKENS + 1 tokens that count."""
    generator = torch.Generator().manual_seed(2)
    tokens_BLE = torch.randn(rows, TOKENS, TEXT_DIM, generator=generator, dtype=dtype)
    return Text(tokens_BLE, torch.arange(TOKENS) <= (torch.arange(rows) % TOKENS)[:, None])


def condition(kind: dict, rows: int = 4, dtype: torch.dtype = torch.float32) -> Condition:
    return texts(rows, dtype) if kind is TEXT else torch.arange(rows) % 4


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("adaln", ["zero", "single"])
def test_masked_tokens_do_not_matter_and_the_others_do(network, adaln: str) -> None:
    model, text = perturbed(network, adaln=adaln, **TEXT), texts()
    output = model(*inputs(), text)
    changed = torch.where(text.mask_BL[..., None], text.tokens_BLE, 100.0)
    assert torch.equal(model(*inputs(), Text(changed, text.mask_BL)), output)
    for token in range(TOKENS):
        changed = text.tokens_BLE.clone()
        changed[:, token] += 1
        moved_B = (model(*inputs(), Text(changed, text.mask_BL)) != output).flatten(1).any(1)
        assert torch.equal(moved_B, text.mask_BL[:, token])


def test_text_is_a_set_of_tokens() -> None:
    model, text = perturbed(**TEXT).double(), texts(dtype=torch.float64)
    order = torch.tensor([3, 1, 4, 0, 2])
    shuffled = Text(text.tokens_BLE[:, order], text.mask_BL[:, order])
    row = inputs(dtype=torch.float64)
    torch.testing.assert_close(model(*row, shuffled), model(*row, text), rtol=0, atol=1e-12)


def test_a_pooled_vector_changes_nothing() -> None:
    model, text = perturbed(**TEXT), texts()
    pooled = Text(text.tokens_BLE, text.mask_BL, torch.randn(4, 3))
    assert torch.equal(model(*inputs(), pooled), model(*inputs(), text))


@settings(max_examples=25, deadline=None)
@given(
    network=st.sampled_from(NETWORKS),
    combination=st.sampled_from(COMBINATIONS),
    rows=st.lists(st.integers(0, 5), min_size=1, max_size=6),
)
def test_a_row_depends_on_its_own_condition_alone(network, combination, rows: list[int]) -> None:
    adaln, kind = combination
    model = perturbed(network, adaln=adaln, **kind).double()
    x_BCHW, t_B = inputs(6, torch.float64)
    conditions = condition(kind, 6, torch.float64)
    all_rows = model(x_BCHW, t_B, conditions)
    some = model(x_BCHW[rows], t_B[rows], join([conditions[row : row + 1] for row in rows]))
    torch.testing.assert_close(some, all_rows[rows], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("adaln", "kind"), COMBINATIONS)
def test_the_network_is_zero_and_blocks_are_the_identity_at_initialisation(adaln: str, kind: dict) -> None:
    model = DiT(**SIZE, **kind, adaln=adaln)
    assert torch.equal(model(*inputs(), condition(kind)), torch.zeros(4, 2, 8, 8))
    router = Router(num_experts=4, **SIZE, **kind, adaln=adaln)
    assert torch.equal(router(*inputs(), condition(kind)), torch.zeros(4, 4))
    seen: list[torch.Tensor] = []
    for block in model.trunk.blocks:
        block.register_forward_hook(lambda module, given, output: seen.extend([given[0], output]))
    model(*inputs(), condition(kind))
    assert len(seen) == 4
    assert all(torch.equal(tokens, seen[0]) for tokens in seen)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize(("adaln", "kind"), COMBINATIONS)
def test_gradients_reach_every_parameter(network, adaln: str, kind: dict) -> None:
    model = perturbed(network, adaln=adaln, **kind)
    generator = torch.Generator().manual_seed(3)
    output = model(*inputs(), condition(kind))
    (output * torch.randn(output.shape, generator=generator)).sum().backward()
    without = [name for name, tensor in model.named_parameters() if tensor.grad is None or not tensor.grad.any()]
    assert without == []


@pytest.mark.parametrize(("adaln", "kind"), COMBINATIONS)
def test_training_from_the_initial_zero_opens_every_gate(adaln: str, kind: dict) -> None:
    torch.manual_seed(0)
    model = DiT(**SIZE, **kind, adaln=adaln)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        (model(*inputs(), condition(kind)) - inputs()[0]).square().sum().backward()
        optimizer.step()
    assert [name for name, tensor in model.state_dict().items() if torch.equal(tensor, before[name])] == []


@pytest.mark.parametrize("network", NETWORKS)
def test_a_condition_of_the_wrong_kind_is_refused_in_one_line(network) -> None:
    labels = torch.arange(4)
    with pytest.raises(SamplingError, match=r"^the model is conditioned on class labels and was given texts: .*$"):
        perturbed(network, **CLASSES)(*inputs(), texts())
    with pytest.raises(SamplingError, match=r"^the model is conditioned on texts and was given class labels: .*$"):
        perturbed(network, **TEXT)(*inputs(), labels)
    with pytest.raises(SamplingError, match=r"^texts have 6 channels, the model takes 7: .*$"):
        perturbed(network, **{**TEXT, "text_dim": 7})(*inputs(), texts())


@pytest.mark.parametrize("network", NETWORKS)
def test_an_unconditional_network_ignores_conditions(network) -> None:
    model = perturbed(network, num_classes=None)
    assert torch.equal(model(*inputs(), torch.arange(4)), model(*inputs(), texts()))
    assert not [name for name in model.state_dict() if "label" in name or "text" in name or "cross" in name]


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("change", [{"num_classes": 3, "text_dim": 6}, {"num_classes": 3, "adaln": "none"}])
def test_contradictions_are_refused(network, change: dict) -> None:
    with pytest.raises(ConfigError):
        network(**SIZE, **change)
