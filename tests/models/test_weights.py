import json

import pytest
import torch

from ddm_ray.errors import CorruptArtifact
from ddm_ray.models.dit import DiT
from ddm_ray.models.router import Router
from ddm_ray.models.weights import build, describe, load, to_bytes

SIZE = {"image_size": 4, "channels": 1, "num_classes": 2, "patch_size": 2, "width": 8, "depth": 1, "heads": 2}


def scrambled(model):
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


MODELS = [lambda: DiT(**SIZE, analytic_skip=0.5), lambda: Router(num_experts=3, **SIZE)]


@pytest.mark.parametrize("make", MODELS)
def test_round_trip_is_exact(make) -> None:
    model = scrambled(make())
    weights, spec = to_bytes(model, describe(model))
    again = load(json.loads(spec), weights)
    assert type(again) is type(model)
    assert again.config == model.config
    assert not again.training
    row = torch.randn(2, 1, 4, 4), torch.tensor([0.2, 0.9]), torch.tensor([0, 2])
    assert torch.equal(again(*row), model(*row))


def test_a_state_such_as_an_ema_is_written_under_the_models_spec() -> None:
    model = scrambled(DiT(**SIZE))
    halved = {name: (tensor / 2).bfloat16() for name, tensor in model.state_dict().items()}
    weights, spec = to_bytes(halved, describe(model))
    again = load(json.loads(spec), weights).state_dict()
    assert all(torch.equal(again[name], tensor.float()) for name, tensor in halved.items())


def test_positions_are_not_stored() -> None:
    assert not [name for name in DiT(**SIZE).state_dict() if "positions" in name]


def altered(change):
    model = scrambled(DiT(**SIZE))
    state = dict(model.state_dict())
    change(state)
    return describe(model), to_bytes(state, {})[0]


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
        load(spec, weights)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("cut", [lambda w: w[:-1], lambda w: w[:20], lambda w: b"", lambda w: b"\xff" * 40 + w])
def test_truncated_bytes_are_refused(cut) -> None:
    spec, weights = altered(lambda state: None)
    with pytest.raises(CorruptArtifact, match="not whole safetensors") as refused:
        load(spec, cut(weights))
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
