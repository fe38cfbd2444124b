"""A tiny DINOv2 of timm, with random weights in a file, as an embedder's settings."""

from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import save_file

MODEL = "vit_small_patch14_dinov2"
SMALL = {"embed_dim": 32, "depth": 2, "num_heads": 2, "img_size": 28}


def write_small_vit(path: Path) -> dict[str, Any]:
    """Write its weights to this file; fields of the EmbedderConfig that loads them."""
    torch.manual_seed(0)
    weights = timm.create_model(MODEL, num_classes=0, **SMALL).state_dict()
    # As they are drawn, the layers of DINOv2 scale what they see of an image to nearly nothing.
    for name in (name for name in weights if "gamma" in name):
        weights[name] = torch.ones_like(weights[name])
    save_file(weights, path)
    return {"kind": "timm", "model": MODEL, "checkpoint": str(path), "model_args": SMALL}
