"""The router p(k | x, t, condition): the denoiser's trunk with a learned CLS token and a linear head.

Shapes: B rows, CHW image, K experts, D width.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ddm_ray.core.condition import Condition
from ddm_ray.models.blocks import AdaLN
from ddm_ray.models.dit import Trunk


class Router(nn.Module):
    """x_BCHW, t_B in [0, 1], condition (as DiT takes it) -> logits_BK; uniform at initialisation."""

    def __init__(
        self,
        num_experts: int,
        image_size: int,
        channels: int,
        num_classes: int | None,
        patch_size: int,
        width: int,
        depth: int,
        heads: int,
        mlp_ratio: float = 4.0,
        adaln: AdaLN = "zero",
        text_dim: int | None = None,
    ) -> None:
        super().__init__()
        trunk: dict[str, Any] = {
            "image_size": image_size,
            "channels": channels,
            "num_classes": num_classes,
            "patch_size": patch_size,
            "width": width,
            "depth": depth,
            "heads": heads,
            "mlp_ratio": mlp_ratio,
            "adaln": adaln,
            "text_dim": text_dim,
        }
        self.config: dict[str, Any] = {"num_experts": num_experts, **trunk}
        self.text_dim = text_dim
        self.trunk = Trunk(**trunk)
        self.cls_D = nn.Parameter(torch.randn(width) * 0.02)
        self.head = nn.Linear(width, num_experts)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x_BCHW: Tensor, t_B: Tensor, condition: Condition) -> Tensor:
        return self.head(self.trunk(x_BCHW, t_B, condition, self.cls_D)[:, 0])
