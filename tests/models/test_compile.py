"""torch.compile takes a network's blocks as one graph, whichever way it is trained."""

import pytest
import torch

from ddm_ray.models.compiled import compile_blocks
from ddm_ray.models.network import checkpoint_activations
from tests.counted_graphs import counted_graphs
from tests.models.test_activations import loss_and_gradients
from tests.models.test_diffusers_transformer import NAMES
from tests.models.test_diffusers_transformer import network as of_diffusers
from tests.models.test_text_condition import CLASSES, TEXT, condition, inputs, perturbed

pytestmark = pytest.mark.contract

KEPT_BM = torch.tensor([[0, 7, 9], [1, 2, 3], [4, 8, 15], [3, 7, 11]])


@pytest.mark.parametrize(
    ("kind", "kept", "checkpointed"),
    [(CLASSES, (), False), (CLASSES, (KEPT_BM,), True), (TEXT, (KEPT_BM,), False)],
    ids=["labels", "labels, masked, checkpointed", "texts, masked"],
)
def test_forward_and_backward_have_no_graph_break(kind: dict, kept: tuple, checkpointed: bool) -> None:
    model, rows = perturbed(analytic_skip=0.5, **kind), (*inputs(), condition(kind))
    loss, gradients = loss_and_gradients(model, rows, *kept)
    names = list(model.state_dict())
    checkpoint_activations(model, checkpointed)
    with counted_graphs("aot_eager") as graphs:
        compile_blocks(model)
        again, gradients_again = loss_and_gradients(model, rows, *kept)
        assert graphs.num == 1 and not graphs.breaks
    torch.testing.assert_close(again, loss)
    torch.testing.assert_close(gradients_again, gradients)
    assert list(model.state_dict()) == names


@pytest.mark.parametrize("name", NAMES)
def test_the_blocks_of_diffusers_transformers_are_compiled(name: str) -> None:
    model = of_diffusers(name)
    compile_blocks(model)
    blocks = {path for path, module in model.named_modules() if module._compiled_call_impl is not None}
    lists = ["transformer_blocks"] + ["single_transformer_blocks"] * (name == "FluxTransformer2DModel")
    assert blocks == {f"transformer.{each}.{number}" for each in lists for number in range(2)}
