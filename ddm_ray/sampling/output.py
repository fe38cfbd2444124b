"""The result of a pipeline: images, and the experts that sampled them.

Shapes: B images, C channels, H, W, S steps, K experts.
"""

import os
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ddm_ray.errors import SamplingError
from ddm_ray.pictures.files import FORMATS, write
from ddm_ray.pictures.grid import GridRow, grid
from ddm_ray.pictures.images import to_pil, to_unit
from ddm_ray.sampling import trace
from ddm_ray.spelling import some

OutputType = Literal["pil", "pt", "np", "latent"]
Images = list[Image.Image] | Tensor | np.ndarray


@dataclass(frozen=True, repr=False)
class DDMOutput:
    """Images in the form asked for, the seed and condition of each, and the experts that sampled it.

    `routing_SBK`: the experts' weights in each step, in the order of `clusters`, their numbers; `times_S`: where each
    step begins, 1 is noise. What was paid: rows that experts and router evaluated.
    """

    images: Any  # one of Images, by the output_type of the call, which a type checker can't know
    seeds: tuple[int, ...]
    prompts: tuple[str, ...]
    routing_SBK: Tensor
    times_S: Tensor
    num_expert_rows: int
    num_router_rows: int
    latent: bool = False
    clusters: tuple[int, ...] = ()

    @property
    def experts_SB(self) -> Tensor:
        """The number of the heaviest expert per step and image, the first one on ties."""
        heaviest_SB = self.routing_SBK.argmax(dim=2)
        return torch.tensor(self.clusters)[heaviest_SB] if self.clusters else heaviest_SB

    def __repr__(self) -> str:
        steps, images, experts = self.routing_SBK.shape
        seeds = some([str(seed) for seed in self.seeds])
        return f"DDMOutput({images} images of seeds {seeds}, sampled by {experts} experts in {steps} steps)"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one picture of all images, enlarged so that small ones can be seen, with a row for each prompt.

        The path ends in .png, .jpg or .webp. Raises SamplingError for another one, and for latents.
        """
        if Path(path).suffix.lower() not in FORMATS:
            raise SamplingError(f"{os.fspath(path)}: name a {' or '.join(FORMATS)} file")
        pictures = self._pictures()
        if pictures is None:
            raise SamplingError("latents are no pictures: use another output_type")
        unit_BHWC = torch.from_numpy(np.stack(pictures)).reshape(len(pictures), *pictures[0].shape[:2], -1)
        groups = [(prompt, len(list(each))) for prompt, each in groupby(self.prompts)]
        parts = (2 * unit_BHWC.permute(0, 3, 1, 2) - 1).split([count for _, count in groups])
        rows = [GridRow(prompt or "any", part) for (prompt, _), part in zip(groups, parts, strict=True)]
        write(grid(rows), path)

    def plot_routing(self, path: str | os.PathLike[str]) -> None:
        """Write a picture: each image, and from noise to data the weights of its experts (16 images at most)."""
        captions = zip(self.prompts, self.seeds, strict=True)
        titles = [f"{prompt or 'unconditional'}  ·  seed {seed}" for prompt, seed in captions]
        trace.plot_routing(Path(path), self.routing_SBK, self.times_S, self._pictures(), titles, self.clusters)

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
