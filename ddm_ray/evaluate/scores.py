"""Measured images, and differences between two models' with intervals.

Shapes: M images.
"""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from ddm_ray.evaluate.image_set import ImageSet
from ddm_ray.evaluate.metrics import deviation, row_of

NORMAL_95 = 1.96


@dataclass(frozen=True)
class Measured:
    """A row of the table (`row_of`), and how far each image pulls the Fréchet distance."""

    row: dict[str, Any]
    pull_M: np.ndarray

    @classmethod
    def of(cls, images: ImageSet) -> Self:
        """By all metrics."""
        return cls(row_of(images), images.frechet[1])


@dataclass(frozen=True)
class Difference:
    """A model's Fréchet distance less another's, and the ends of its 95 % interval over other samples.

    Images of the same label and seed are pairs, whose pulls are alike: a difference is known better than its parts.
    """

    model: str
    against: str
    frechet: float
    low: float
    high: float

    @classmethod
    def of(cls, names: tuple[str, str], model: Measured, against: Measured) -> Self:
        """From the measures of as many images each."""
        estimate = model.row["frechet"] - against.row["frechet"]
        half = NORMAL_95 * deviation(model.pull_M - against.pull_M)
        return cls(*names, estimate, estimate - half, estimate + half)
