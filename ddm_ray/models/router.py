"""The router p(k | x, t, condition): the denoiser's trunk with a learned CLS token and a linear head.

Shapes: B rows, CHW image, K experts, D width.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ddm_ray.core.condition import Condition
from ddm_ray.models.dit import Trunk
from ddm_ray.models.network import Network


class Router(Network):
    """x_BCHW, t_B in [0, 1], condition -> logits_BK; takes the trunk's arguments. Uniform at initialisation."""

    parts = (Trunk,)

    def __init__(self, *, num_experts: int, **trunk: Any) -> None:
        super().__init__()
        self.trunk = Trunk(**trunk)
        self.config = {"num_experts": num_experts, **self.trunk.config}
        self.text_dim = self.trunk.text_dim
        width = self.config["width"]
        self.cls_D = nn.Parameter(torch.empty(width))
        nn.init.normal_(self.cls_D, std=0.02)
        self.head = nn.Linear(width, num_experts)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def with_experts(self, sources: Sequence[int | None]) -> "Router":
        """A router with this trunk, and for each expert the row of the head that one of this router's experts has.

        None stands for an expert that this router doesn't know: its logit is the mean of all others'. Without rows the
        posterior of the rest is this router's, renormalised (docs/concepts/mixture.md). Two experts with one row share
        its probability equally.
        """
        with torch.no_grad():
            router = Router(**{**self.config, "num_experts": len(sources)})
            router.load_state_dict({**self.state_dict(), **router.head.state_dict(prefix="head.")})
            times_K = torch.tensor([max(1, list(sources).count(source)) for source in sources])
            for name in ("weight", "bias"):
                rows_K = getattr(self.head, name)
                rows = [rows_K.mean(dim=0) if source is None else rows_K[source] for source in sources]
                getattr(router.head, name).copy_(torch.stack(rows))
            shared_K = torch.tensor([source is not None for source in sources])
            router.head.bias.sub_(torch.where(shared_K, times_K.log(), 0.0))
        return router.eval()

    def forward(self, x_BCHW: Tensor, t_B: Tensor, condition: Condition) -> Tensor:
        return self.head(self.trunk(x_BCHW, t_B, condition, self.cls_D)[:, 0])
