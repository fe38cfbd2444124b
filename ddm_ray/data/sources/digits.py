"""scikit-learn's handwritten digits: a source that needs neither network nor disk."""

from collections.abc import Container, Iterator
from dataclasses import dataclass

import numpy as np

from ddm_ray.data.sources.chunks import Encoded, EncodedChunk, Listing, Unit, chunked
from ddm_ray.data.sources.named import NamedSource

NUM_ROWS = 1797


@dataclass(frozen=True)
class Digits(NamedSource):
    """scikit-learn's 1,797 handwritten digits of 8x8 pixels, grey, as PNG files; see Source."""

    forms = ("digits",)
    about = "scikit-learn's 1,797 handwritten digits, 8 x 8, grey"

    def list(self) -> Listing:
        """One unit."""
        return Listing((Unit("digits", NUM_ROWS * 64),), rows=NUM_ROWS)

    def read(self, unit: Unit, skip: Container[int] = ()) -> Iterator[EncodedChunk]:
        """See Source."""
        return chunked(self._rows(), self.chunk_rows, skip)

    def _rows(self) -> Iterator[tuple[Encoded, float]]:
        from sklearn.datasets import load_digits

        pixels_NHW, labels_N = load_digits(return_X_y=True)
        pixels_NHW = np.rint(pixels_NHW.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
        for index, (pixels_HW, label) in enumerate(zip(pixels_NHW, labels_N.tolist(), strict=True)):
            condition = f"the digit {label}" if self.conditions.captions else label
            yield self.encoded(f"digits/{index:04d}", pixels_HW, condition), (index + 1) / len(labels_N)
