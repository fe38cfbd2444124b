"""The router p(k | x, t, condition): the denoiser's trunk with a learned CLS token and a linear head.

Shapes: B rows, CHW image, K experts, D width.
"""

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

    def forward(self, x_BCHW: Tensor, t_B: Tensor, condition: Condition) -> Tensor:
        return self.head(self.trunk(x_BCHW, t_B, condition, self.cls_D)[:, 0])
