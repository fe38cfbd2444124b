"""Generated images and the run's real rows as seen by one network: the input of every metric.

Shapes: M images, C classes and the null one, K clusters, D features.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ddm_ray.data.loading.loader import Rows
from ddm_ray.evaluate.captions import CaptionScore
from ddm_ray.evaluate.distances import RealNeighbours, nearest_rows
from ddm_ray.evaluate.features import CHUNK, FeatureNet, see
from ddm_ray.evaluate.reference import RealFeatures
from ddm_ray.models.embedders import Embedder

NEIGHBOUR_ROWS = 10_000
"""Maximum samples, and maximum real rows, of a neighbour search; the usual number in the literature."""

PulledDistance = tuple[float, np.ndarray]
"""A distance, and the pull of each of M images on it."""


@dataclass(frozen=True)
class ImageSet:
    """M images as a reference sees them.

    `cluster_M`: the cluster of each image's nearest real row in feature space. `label_M`: the requested labels; 0,
    the row of p(k), if rows have no labels. `class_M`: the classifier's likeliest class. `images`: yields parts
    (B, C, H, W) in [-1, 1]. Both are None for redrawn real rows. `caption_M`: indices of the requested captions, or
    None.
    """

    reference: "Reference"
    features_MD: np.ndarray
    cluster_M: np.ndarray
    label_M: np.ndarray
    class_M: np.ndarray | None = None
    images: Callable[[], Iterable[Tensor]] | None = None
    caption_M: Tensor | None = None

    def __len__(self) -> int:
        return len(self.features_MD)

    @cached_property
    def distance(self) -> PulledDistance:
        """Fréchet distance to the real rows (`Gaussian.measure`)."""
        return self.reference.real.gaussian.measure(self.features_MD)


@dataclass(frozen=True)
class Reference:
    """The real rows as the classifier or an embedder sees them. All images are compared with these.

    `train`: rows in memory, as images in [-1, 1]. `labelled`: the classifier predicts labels; otherwise clusters.
    `whole_set`: the features of all training rows are kept, which is necessary to detect copies. `embedder`: gives
    the features; None: the classifier does. `captions`: the captions that images are sampled for, as CLIP sees them.
    """

    net: FeatureNet
    real: RealFeatures
    train: Rows
    prior_CK: np.ndarray
    seed: int
    labelled: bool = True
    whole_set: bool = True
    embedder: Embedder | None = None
    captions: CaptionScore | None = None

    @cached_property
    def neighbours(self) -> RealNeighbours:
        """The real rows that a neighbour search covers."""
        drawn = np.random.default_rng(self.seed).permutation(len(self.real.label_M))[:NEIGHBOUR_ROWS]
        return RealNeighbours.of(self.real.features_MD[np.sort(drawn)])

    @property
    def num_features(self) -> int:
        """D."""
        return int(self.real.features_MD.shape[1])

    def see(self, images: Callable[[], Iterable[Tensor]], number_M: Tensor | None) -> ImageSet:
        """See images, yielded as parts (B, C, H, W) in [-1, 1], that were sampled for the conditions `number_M`.

        A number is a label, or the index of a caption if rows have no labels; None: there were no captions.
        """
        seen = see(self.net, images(), self.embedder)
        label_M = number_M.numpy() if self.labelled and number_M is not None else np.zeros_like(seen.class_N)
        caption_M = None if self.captions is None else number_M
        return ImageSet(
            self, seen.features_ND, self._clusters(seen.features_ND), label_M, seen.class_N, images, caption_M
        )

    def drawn_again(self, n: int) -> ImageSet:
        """See `n` real rows, drawn with replacement: about the best result that a sampler can reach."""
        rows_M = np.random.default_rng(self.seed).integers(len(self.real.label_M), size=n)
        real = self.real
        return ImageSet(self, real.features_MD[rows_M], real.cluster_M[rows_M], real.label_M[rows_M])

    def mosaics(self, n: int) -> ImageSet:
        """See `n` mosaics of quarters of four training rows: a metric that works finds them bad."""
        rows_M4 = torch.from_numpy(np.random.default_rng(self.seed).integers(len(self.train), size=(n, 4)))
        label_M = self.train.label_N[rows_M4[:, 0]] if self.labelled else None
        return self.see(lambda: (self._mosaic(rows_B4) for rows_B4 in rows_M4.split(CHUNK)), label_M)

    def noise(self, n: int) -> ImageSet:
        """See `n` images of Gaussian noise, with the labels of training rows: what a metric that works finds worst."""
        shape = self.train.data_NCHW.shape[1:]

        def images() -> Iterable[Tensor]:
            generator = torch.Generator().manual_seed(self.seed)
            for size in (min(CHUNK, n - start) for start in range(0, n, CHUNK)):
                yield torch.randn(size, *shape, generator=generator).clamp_(-1, 1)

        rows_M = torch.from_numpy(np.random.default_rng(self.seed).integers(len(self.train), size=n))
        return self.see(images, self.train.label_N[rows_M] if self.labelled else None)

    def neighbour_clusters(self, images_MCHW: Tensor) -> np.ndarray:
        """The cluster (M,), int64, of each image's nearest real row in feature space. Images are in [-1, 1]."""
        return self._clusters(see(self.net, [images_MCHW], self.embedder).features_ND)

    def _clusters(self, features_MD: np.ndarray) -> np.ndarray:
        return self.real.cluster_M[nearest_rows(self.real.features_MD, features_MD)]

    def _mosaic(self, rows_B4: Tensor) -> Tensor:
        images_BCHW = self.train.data_NCHW[rows_B4[:, 0]]
        middle, half = (side // 2 for side in images_BCHW.shape[2:])
        quarters = (np.s_[:, :, :middle, half:], np.s_[:, :, middle:, :half], np.s_[:, :, middle:, half:])
        for number, quarter in enumerate(quarters, start=1):
            images_BCHW[quarter] = self.train.data_NCHW[rows_B4[:, number]][quarter]
        return images_BCHW
