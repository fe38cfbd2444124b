"""torch.compile takes a whole network as one graph, whichever way it is trained."""

import pytest
import torch

from ddm_ray.models.dit import checkpoint_activations
from tests.models.test_activations import loss_and_gradients
from tests.models.test_text_condition import CLASSES, TEXT, condition, inputs, perturbed

KEPT_BM = torch.tensor([[0, 7, 9], [1, 2, 3], [4, 8, 15], [3, 7, 11]])


@pytest.mark.parametrize(
    ("kind", "kept", "checkpointed"),
    [(CLASSES, (), False), (CLASSES, (KEPT_BM,), True), (TEXT, (KEPT_BM,), False)],
    ids=["labels", "labels, masked, checkpointed", "texts, masked"],
)
def test_forward_and_backward_have_no_graph_break(kind: dict, kept: tuple, checkpointed: bool) -> None:
    model, rows = perturbed(analytic_skip=0.5, **kind), (*inputs(), condition(kind))
    loss, gradients = loss_and_gradients(model, rows, *kept)
    checkpoint_activations(model, checkpointed)
    torch.compiler.reset()
    # Traced and differentiated as for any compiler, but no code is made: that takes most of a minute.
    model.compile(dynamic=False, fullgraph=True, backend="aot_eager")
    again, gradients_again = loss_and_gradients(model, rows, *kept)
    torch.testing.assert_close(again, loss)
    torch.testing.assert_close(gradients_again, gradients)
