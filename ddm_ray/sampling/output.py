"""The result of a pipeline: images, and the experts that sampled them.

Shapes: B images, C channels, H, W, S steps, K experts.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image
from torch import Tensor

from ddm_ray.pictures.images import to_pil, to_unit
from ddm_ray.sampling import trace

OutputType = Literal["pil", "pt", "np", "latent"]
Images = list[Image.Image] | Tensor | np.ndarray


@dataclass(frozen=True)
class DDMOutput:
    """Images in the form asked for, the seed and condition of each, and the experts that sampled it.

    `routing_SBK`: the experts' weights in each step; `times_S`: where each step begins, 1 is noise. What was paid:
    rows that experts and router evaluated.
    """

    images: Any  # one of Images, by the output_type of the call, which a type checker can't know
    seeds: tuple[int, ...]
    prompts: tuple[str, ...]
    routing_SBK: Tensor
    times_S: Tensor
    num_expert_rows: int
    num_router_rows: int
    latent: bool = False

    @property
    def experts_SB(self) -> Tensor:
        """The heaviest expert per step and image, the first one on ties."""
        return self.routing_SBK.argmax(dim=2)

    def plot_routing(self, path: str | os.PathLike[str]) -> None:
        """Write a picture: each image, and from noise to data the weights of its experts (16 images at most)."""
        captions = zip(self.prompts, self.seeds, strict=True)
        titles = [f"{prompt or 'unconditional'}  ·  seed {seed}" for prompt, seed in captions]
        trace.plot_routing(Path(path), self.routing_SBK, self.times_S, self._pictures(), titles)

    def _pictures(self) -> list[np.ndarray] | None:
        if isinstance(self.images, list):
            return [np.asarray(image) / 255 for image in self.images]
        if isinstance(self.images, np.ndarray):
            return list(self.images)
        return None if self.latent else list(self.images.permute(0, 2, 3, 1).numpy())


def images_as(output_type: OutputType, images_BCHW: Tensor) -> Images:
    """Model range [-1, 1] as pictures, as [0, 1] of (B, C, H, W) or (B, H, W, C); "latent": as it is."""
    if output_type == "latent":
        return images_BCHW
    unit_BCHW = to_unit(images_BCHW)
    if output_type == "pil":
        return to_pil(unit_BCHW)
    return unit_BCHW.permute(0, 2, 3, 1).numpy() if output_type == "np" else unit_BCHW
