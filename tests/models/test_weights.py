import json

import pytest
import torch

from ddm_ray.core.condition import Text
from ddm_ray.errors import CorruptArtifact
from ddm_ray.models.dit import DiT
from ddm_ray.models.router import Router
from ddm_ray.models.weights import build, load_model, spec_of_model, weights_as_bytes

SIZE = {"image_size": 4, "channels": 1, "num_classes": 2, "patch_size": 2, "width": 8, "depth": 1, "heads": 2}


def scrambled(model):
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


TEXT = {**SIZE, "num_classes": None, "text_dim": 3, "adaln": "single"}
MODELS = [
    lambda: DiT(**SIZE, analytic_skip=0.5),
    lambda: Router(num_experts=3, **SIZE),
    lambda: DiT(**TEXT),
    lambda: Router(num_experts=3, **TEXT),
]


def row(model) -> tuple:
    text = Text(torch.randn(2, 3, 3), torch.ones(2, 3, dtype=torch.bool))
    labels = torch.tensor([0, 2])
    return torch.randn(2, 1, 4, 4), torch.tensor([0.2, 0.9]), labels if model.config.get("num_classes") else text


@pytest.mark.parametrize("make", MODELS)
def test_round_trip_is_exact(make) -> None:
    model = scrambled(make())
    weights, spec = weights_as_bytes(model, spec_of_model(model))
    again = load_model(json.loads(spec), weights)
    assert type(again) is type(model)
    assert again.config == model.config
    assert not again.training
    given = row(model)
    assert torch.equal(again(*given), model(*given))


def test_loading_draws_no_random_numbers_and_leaves_nothing_without_memory() -> None:
    model = scrambled(DiT(**SIZE))
    weights, _ = weights_as_bytes(model, {})
    before = torch.get_rng_state()
    again = load_model(spec_of_model(model), weights)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(again.trunk.positions_1ND, model.trunk.positions_1ND)
    for tensor in again.parameters():
        assert tensor.device.type == "cpu"
        assert tensor.requires_grad
        assert tensor.data_ptr() % 64 == 0


@pytest.mark.parametrize("make", MODELS)
def test_numbers_that_are_read_next_are_not_drawn(make) -> None:
    """Tables that no file has are there all the same."""
    spec = spec_of_model(make())
    filled = build(spec)
    before = torch.random.get_rng_state()
    empty = build(spec, filled=False)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert {name: each.shape for name, each in empty.named_parameters()} == {
        name: each.shape for name, each in filled.named_parameters()
    }
    for ours, theirs in zip(empty.buffers(), filled.buffers(), strict=True):
        assert torch.equal(ours, theirs)
    empty.load_state_dict(filled.state_dict())
    assert weights_as_bytes(empty, spec) == weights_as_bytes(filled, spec)


def test_on_the_meta_device_there_are_shapes_but_no_memory() -> None:
    size = {**SIZE, "num_classes": 10, "width": 2**16, "heads": 2, "depth": 40}
    model = build({"class": "DiT", "config": size}, device="meta")
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    output = model(torch.zeros(3, 1, 4, 4, device="meta"), torch.zeros(3, device="meta"), torch.arange(3).to("meta"))
    assert output.shape == (3, 1, 4, 4)


def test_a_state_such_as_an_ema_is_written_under_the_models_spec() -> None:
    model = scrambled(DiT(**SIZE))
    halved = {name: (tensor / 2).bfloat16() for name, tensor in model.state_dict().items()}
    weights, spec = weights_as_bytes(halved, spec_of_model(model))
    again = load_model(json.loads(spec), weights).state_dict()
    assert all(torch.equal(again[name], tensor.float()) for name, tensor in halved.items())


def altered(change):
    model = scrambled(DiT(**SIZE))
    state = dict(model.state_dict())
    change(state)
    return spec_of_model(model), weights_as_bytes(state, {})[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("head.bias"), r"lack the tensor head.bias of shape \(4,\)"),
        (lambda s: s.update({"head.bias": torch.zeros(5)}), r"head.bias has shape \(5,\), expected \(4,\)"),
        (lambda s: s.update({"head.more": torch.zeros(5)}), "head.more that a DiT doesn't know"),
    ],
)
def test_a_wrong_tensor_is_named(change, message: str) -> None:
    spec, weights = altered(change)
    with pytest.raises(CorruptArtifact, match=message) as refused:
        load_model(spec, weights)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("cut", [lambda w: w[:-1], lambda w: w[:20], lambda w: b"", lambda w: b"\xff" * 40 + w])
def test_truncated_bytes_are_refused(cut) -> None:
    spec, weights = altered(lambda state: None)
    with pytest.raises(CorruptArtifact, match="not whole safetensors") as refused:
        load_model(spec, cut(weights))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"class": "UNet", "config": {}},
        {"class": "DiT"},
        {"class": "DiT", "config": {**SIZE, "heads": 3}},
        {"class": "DiT", "config": {"image_size": 8}},
        {"class": "DiT", "config": {**SIZE, "colour": 1}},
    ],
)
def test_a_spec_that_is_not_ours_is_refused(spec: dict) -> None:
    with pytest.raises(CorruptArtifact, match="model spec"):
        build(spec)
