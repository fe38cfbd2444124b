"""Augmentation of training images: each time that a row is trained on, a view of it is drawn, mirrored or cropped.

Shapes: B rows of a global batch, CHW image.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ddm_ray.core.streams import AUGMENTATION, stream


@dataclass(frozen=True)
class Views:
    """Views of B rows: mirrored_B bool, left for right; corner_B2 int64, first row and column of each one's crop."""

    mirrored_B: Tensor
    corner_B2: Tensor

    def __getitem__(self, place_B: Tensor) -> "Views":
        """The views of the rows at these places."""
        return Views(self.mirrored_B[place_B], self.corner_B2[place_B])


@dataclass(frozen=True)
class Augmentation:
    """The views that rows are trained on: mirrored as often as not, and crops of images `margin` pixels larger."""

    mirrors: bool = False
    margin: int = 0

    def draw(self, seed: int, key: tuple[int, ...], step: int, batch: int) -> Views | None:
        """The views of global step `step` of the job `key`, whatever the world size; None: rows as they are."""
        if not self.mirrors and not self.margin:
            return None
        numbers = stream(seed, AUGMENTATION, *key, step)
        corner_B2 = numbers.integers(self.margin + 1, size=(batch, 2))
        mirrored_B = numbers.random(batch) < 0.5 if self.mirrors else np.zeros(batch, bool)
        return Views(torch.from_numpy(mirrored_B), torch.from_numpy(corner_B2))
