"""CLIP score: how well images match their captions.

Shapes: M images, P captions, CHW image, D dimensions.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from ddm_ray.evaluate.features import CHUNK
from ddm_ray.evaluate.real_rows import RealRows
from ddm_ray.models.clip import Clip
from ddm_ray.pictures.images import to_bytes, to_unit

CLIP_SCALE = 100.0
"""Factor on the cosine: Hessel et al. 2021 (arXiv 2104.08718) use 2.5, tables of text-to-image models 100."""


@dataclass(frozen=True)
class CaptionScore:
    """CLIP, and unit vectors of the captions that images are sampled for."""

    clip: Clip
    caption_PD: Tensor

    @classmethod
    def of(cls, clip: Clip, rows: RealRows) -> Self | None:
        """Use the captions of the shown rows. None if an older version wrote the shards: it kept no captions."""
        return None if rows.shown.captions is None else cls(clip, clip.texts(rows.shown.captions))

    def score(self, images: Iterable[Tensor], number_M: Tensor) -> dict[str, float]:
        """Mean of `CLIP_SCALE` times the cosine, clipped at 0, and its standard error.

        `images`: parts (B, C, H, W) in [-1, 1]. `number_M`: the index of each image's caption.
        """
        image_MD = torch.cat(
            [
                self.clip.images(to_bytes(to_unit(few_BCHW)))
                for part_BCHW in images
                for few_BCHW in part_BCHW.split(CHUNK)
            ]
        )
        score_M = CLIP_SCALE * (image_MD * self.caption_PD[number_M]).sum(dim=1).clamp(min=0).double()
        return {"clip": float(score_M.mean()), "clip_std": float(score_M.std() / len(score_M) ** 0.5)}
