"""Networks on a GPU that isn't there: a training step's loss and gradients are a CPU's, and nobody waits for it."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddm_ray.core.condition import Condition
from ddm_ray.models.network import checkpoint_activations
from ddm_ray.models.router import Router
from tests.models.test_activations import loss_and_gradients
from tests.models.test_diffusers_transformer import NAMES
from tests.models.test_diffusers_transformer import network as of_diffusers
from tests.models.test_diffusers_transformer import rows as diffusers_rows
from tests.models.test_text_condition import COMBINATIONS, condition, inputs, perturbed
from tests.pretend_streams import pretended
from tests.train.test_gpu_step import move

META = torch.device("meta")


def check(model: nn.Module, rows: tuple[Tensor, Tensor, Condition], *kept: Tensor) -> None:
    loss, gradients = loss_and_gradients(copy.deepcopy(model), rows, *kept)
    with pretended() as gpu:
        move(model, META)
        moved: tuple[Any, ...] = tuple(each.to(META) for each in (*rows, *kept))
        gpu.waits.clear()
        gpu.uploads.clear()
        on_gpu, gradients_on_gpu = loss_and_gradients(model, moved[:3], *moved[3:])
        assert not gpu.waits and not gpu.uploads, (gpu.waits, gpu.uploads)
        back = {name: gradient.to("cpu") for name, gradient in gradients_on_gpu.items()}
        torch.testing.assert_close(on_gpu.to("cpu"), loss)
    torch.testing.assert_close(back, gradients)
    assert any(gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_those_of_diffusers(name: str, checkpointed: bool) -> None:
    model = of_diffusers(name)
    checkpoint_activations(model, checkpointed)
    check(model, diffusers_rows())


@pytest.mark.parametrize("router", [False, True])
@pytest.mark.parametrize(("adaln", "kind"), COMBINATIONS)
def test_ours(adaln: str, kind: dict, router: bool) -> None:
    how = {"network": lambda **sizes: Router(num_experts=4, **sizes)} if router else {}
    check(perturbed(**how, adaln=adaln, **kind), (*inputs(), condition(kind)))
