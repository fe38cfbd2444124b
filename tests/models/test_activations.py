"""Checkpointed activations: the same loss and gradients to the bit, for fewer bytes kept."""

import pytest
import torch
from torch import Tensor, nn

from ddm_ray.core.condition import Condition
from ddm_ray.models.dit import DiT
from ddm_ray.models.network import checkpoint_activations
from ddm_ray.models.router import Router
from ddm_ray.models.weights import spec_of_model
from tests.models.test_diffusers_transformer import FLUX, PIXART
from tests.models.test_diffusers_transformer import network as of_diffusers
from tests.models.test_diffusers_transformer import rows as diffusers_rows
from tests.models.test_text_condition import CLASSES, COMBINATIONS, TEXT, condition, inputs, perturbed

Inputs = tuple[Tensor, Tensor, Condition]


def loss_and_gradients(model: nn.Module, rows: Inputs, *kept: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Of one training step of the mean square, every parameter's gradient by name."""
    model.train().zero_grad()
    loss = model(*rows, *kept).square().mean()
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def kept_bytes(model: nn.Module, rows: Inputs, *kept: Tensor) -> int:
    """Bytes that a forward pass keeps for the backward one, the parameters aside: those of different storages."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    held: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if (place := tensor.untyped_storage().data_ptr()) not in own:
            held[place] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.train()(*rows, *kept)
    return sum(tensor.untyped_storage().nbytes() for tensor in held.values())


def assert_the_same(model: nn.Module, rows: Inputs, *kept: Tensor) -> None:
    loss, gradients = loss_and_gradients(model, rows, *kept)
    checkpoint_activations(model)
    again, gradients_again = loss_and_gradients(model, rows, *kept)
    assert torch.equal(loss, again) and gradients.keys() == gradients_again.keys()
    assert all(torch.equal(gradients[name], gradients_again[name]) for name in gradients)
    assert any(gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize("network", [DiT, lambda **sizes: Router(num_experts=4, **sizes)], ids=["DiT", "Router"])
@pytest.mark.parametrize(("adaln", "kind"), COMBINATIONS)
def test_loss_and_gradients_are_the_same_to_the_bit(network, adaln: str, kind: dict) -> None:
    assert_the_same(perturbed(network, adaln=adaln, **kind), (*inputs(), condition(kind)))


@pytest.mark.parametrize("kind", [CLASSES, TEXT], ids=["labels", "texts"])
def test_of_some_tokens_too(kind: dict) -> None:
    kept_BM = torch.tensor([[0, 7, 9], [1, 2, 3], [4, 8, 15], [3, 7, 11]])
    assert_the_same(perturbed(**kind), (*inputs(), condition(kind)), kept_BM)


@pytest.mark.parametrize("name", [FLUX, PIXART])
def test_those_of_diffusers_have_a_switch_of_their_own(name: str) -> None:
    model, rows = of_diffusers(name, num_layers=6), diffusers_rows()
    plain = kept_bytes(model, rows)
    assert_the_same(model, rows)
    assert kept_bytes(model, rows) < 0.6 * plain
    checkpoint_activations(model, on=False)
    assert kept_bytes(model, rows) == plain


@pytest.mark.parametrize("network", [DiT, lambda **sizes: Router(num_experts=4, **sizes)], ids=["DiT", "Router"])
def test_eight_blocks_keep_a_fifth_of_the_bytes(network) -> None:
    model, rows = perturbed(network, depth=8, width=32, **CLASSES), (*inputs(), condition(CLASSES))
    plain = kept_bytes(model, rows)
    checkpoint_activations(model)
    assert kept_bytes(model, rows) < plain / 5
    checkpoint_activations(model, on=False)
    assert kept_bytes(model, rows) == plain


def test_only_training_computes_twice() -> None:
    model, rows = perturbed(**CLASSES), (*inputs(), condition(CLASSES))
    spec = spec_of_model(model)
    checkpoint_activations(model)
    calls = []
    model.trunk.blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
    loss_and_gradients(model, rows)
    assert len(calls) == 2
    model.eval()(*rows).sum().backward()
    assert len(calls) == 3
    with torch.no_grad():
        model.train()(*rows)
    assert len(calls) == 4
    assert spec_of_model(model) == spec and not any("checkpoint" in name for name in model.state_dict())
