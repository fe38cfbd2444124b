"""Model pixels to pictures. Shapes: B images, C channels (1 grey, 3 RGB), H, W."""

import numpy as np
from PIL import Image
from torch import Tensor


def to_unit(images_BCHW: Tensor) -> Tensor:
    """Model range [-1, 1] to [0, 1], values outside it clipped; float32 on the CPU."""
    return ((images_BCHW.float().cpu() + 1) / 2).clamp(0, 1)


def to_bytes(unit_BCHW: Tensor) -> np.ndarray:
    """[0, 1] to uint8 (B, H, W, C), rounded to nearest."""
    return (unit_BCHW * 255).round().byte().permute(0, 2, 3, 1).numpy()


def to_pil(unit_BCHW: Tensor) -> list[Image.Image]:
    """[0, 1] to PIL images of mode L or RGB."""
    pixels_BHWC = to_bytes(unit_BCHW)
    return [Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels) for pixels in pixels_BHWC]
