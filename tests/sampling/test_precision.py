"""Networks in bf16 under a state in fp32: near what they give in fp32."""

import pytest
import torch
from torch import Tensor

from ddm_ray.core.flow import Flow
from ddm_ray.core.snr import VelocityField
from tests.models.test_diffusers_transformer import NAMES
from tests.models.test_diffusers_transformer import network as of_diffusers
from tests.models.test_diffusers_transformer import rows as diffusers_rows
from tests.models.test_text_condition import CLASSES, TEXT, condition, inputs, perturbed


def off(actual: Tensor, right: Tensor) -> float:
    """Root mean square of the difference, in that of what is right."""
    assert actual.dtype == right.dtype == torch.float32
    actual, right = actual.detach(), right.detach()
    return float((actual - right).square().mean().sqrt() / right.square().mean().sqrt())


@pytest.mark.parametrize("kind", [CLASSES, TEXT], ids=["labels", "texts"])
@pytest.mark.parametrize("flow", [Flow(), Flow("cosine", "score"), Flow("ddpm", "noise")], ids=str)
def test_a_state_in_fp32_meets_weights_in_bf16(kind: dict, flow: Flow) -> None:
    model, rows = perturbed(analytic_skip=0.5, **kind), (*inputs(), condition(kind))
    right = VelocityField(model, flow)(*rows)
    assert 0 < off(VelocityField(model.bfloat16(), flow)(*rows), right) < 0.1


@pytest.mark.parametrize("name", NAMES)
def test_so_do_transformers_of_diffusers(name: str) -> None:
    model = of_diffusers(name)
    right = model(*diffusers_rows())
    assert 0 < off(model.bfloat16()(*diffusers_rows()).float(), right) < 0.1
