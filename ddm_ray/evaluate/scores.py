"""Scores of one model's samples, measured against the run's real rows.

Shapes: M samples, C classes and the null one, K clusters.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from ddm_ray.data.loading.loader import Rows
from ddm_ray.evaluate.distances import RealNeighbours, kid, nearest, total_variation
from ddm_ray.evaluate.features import CHUNK, FeatureNet, Seen, see
from ddm_ray.evaluate.reference import RealFeatures
from ddm_ray.models.embedders import Embedder

NEIGHBOUR_ROWS = 10_000
"""Samples, and real rows, among which neighbours are looked for, at most; the field's own number."""
NORMAL_95 = 1.96


@dataclass(frozen=True)
class Score:
    """One row of the table, of `n` images. None: not measured for this row.

    Frechet distance and its standard deviation over other samples; kernel distance and its, over subsets; the
    classifier's accuracy in [0, 1]; the parts of a `Neighbourhood`; `cluster_tv`: total variation, in [0, 1], between
    the clusters and those expected from the labels.
    """

    n: int
    frechet: float
    frechet_std: float
    kid: float | None
    kid_std: float | None
    accuracy: float | None
    precision: float | None
    recall: float | None
    density: float | None
    coverage: float | None
    copied: float | None
    cluster_tv: float


@dataclass(frozen=True)
class Measured:
    """A score, and how far each image pulls the Frechet distance (`Gaussian.measure`)."""

    score: Score
    pull_M: np.ndarray


@dataclass(frozen=True)
class Difference:
    """A model's Frechet distance less another's, and the ends of its 95 % interval over other samples.

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
        estimate = model.score.frechet - against.score.frechet
        half = NORMAL_95 * deviation(model.pull_M - against.pull_M)
        return cls(*names, estimate, estimate - half, estimate + half)


def deviation(pull_M: np.ndarray) -> float:
    """The standard deviation, over other samples, of a distance that M of them pull so."""
    return float(pull_M.std(ddof=1) / len(pull_M) ** 0.5)


@dataclass(frozen=True)
class Reference:
    """The real rows, as the classifier or an embedder sees them: everything is compared with these.

    `train`: rows in memory, whose data are images in [-1, 1]. `labelled`: the classifier knows labels; else it knows
    clusters, and labels are taken for 0, the row of p(k). `whole_set`: all training rows' features are kept; only then
    copies can be told. `embedder`: whose features are compared; None: the classifier's.
    """

    net: FeatureNet
    real: RealFeatures
    neighbours: RealNeighbours
    train: Rows
    prior_CK: np.ndarray
    seed: int
    labelled: bool
    whole_set: bool
    embedder: Embedder | None = None

    @classmethod
    def of(
        cls,
        net: FeatureNet,
        real: RealFeatures,
        train: Rows,
        prior_CK: np.ndarray,
        seed: int,
        labelled: bool = True,
        whole_set: bool = True,
        embedder: Embedder | None = None,
    ) -> Self:
        """From features of real rows and the fields above."""
        chosen = np.sort(np.random.default_rng(seed).permutation(len(real.label_M))[:NEIGHBOUR_ROWS])
        neighbours = RealNeighbours.of(real.features_MD[chosen])
        return cls(net, real, neighbours, train, prior_CK, seed, labelled, whole_set, embedder)

    @property
    def num_features(self) -> int:
        """D."""
        return int(self.real.features_MD.shape[1])

    def score(self, images: Iterable[Tensor], label_M: Tensor) -> Score:
        """The score of `measure`."""
        return self.measure(images, label_M).score

    def measure(self, images: Iterable[Tensor], label_M: Tensor) -> Measured:
        """Measure images in [-1, 1], (B, C, H, W) of each part, that were sampled with these labels.

        An image counts as of the cluster of its nearest real row in feature space. Neighbours are those of the first
        NEIGHBOUR_ROWS images.
        """
        seen = see(self.net, images, self.embedder)
        label_M = label_M if self.labelled else torch.zeros_like(label_M)
        cluster_M = self._neighbour_clusters(seen)
        distances, pull_M = self._distances(seen.features_ND)
        neighbourhood = asdict(self.neighbours.compare(seen.features_ND[:NEIGHBOUR_ROWS]))
        if not self.whole_set or self.real.rows > NEIGHBOUR_ROWS:
            neighbourhood["copied"] = None
        score = Score(
            n=len(seen.class_N),
            **distances,
            accuracy=seen.accuracy(label_M.numpy()) if self.labelled else None,
            **neighbourhood,
            cluster_tv=self._cluster_tv(cluster_M, label_M.numpy()),
        )
        return Measured(score, pull_M)

    def neighbour_clusters(self, images_MCHW: Tensor) -> np.ndarray:
        """The cluster (M,), int64, of each image's nearest real row in feature space; images in [-1, 1]."""
        return self._neighbour_clusters(see(self.net, [images_MCHW], self.embedder))

    def floor(self, n: int) -> Score:
        """The score of `n` real rows, drawn with replacement: about the best that a sampler can reach."""
        rows_M = np.random.default_rng(self.seed).integers(len(self.real.label_M), size=n)
        label_M, cluster_M = self.real.label_M[rows_M], self.real.cluster_M[rows_M]
        distances, _ = self._distances(self.real.features_MD[rows_M])
        # A kernel distance of the same rows would be below none; neighbours would be the rows themselves.
        names = ("kid", "kid_std", "accuracy", "precision", "recall", "density", "coverage", "copied")
        unmeasured: dict[str, Any] = dict.fromkeys(names)
        return Score(n=n, **distances | unmeasured, cluster_tv=self._cluster_tv(cluster_M, label_M))

    def mosaics(self, n: int) -> Score:
        """The score of `n` mosaics, whose quarters are of four training rows: a measure that sees finds them bad."""
        rows_M4 = torch.from_numpy(np.random.default_rng(self.seed).integers(len(self.train), size=(n, 4)))
        return self.score(
            (self._mosaic(rows_B4) for rows_B4 in rows_M4.split(CHUNK)), self.train.label_N[rows_M4[:, 0]]
        )

    def _mosaic(self, rows_B4: Tensor) -> Tensor:
        images_BCHW = self.train.data_NCHW[rows_B4[:, 0]]
        middle, half = (side // 2 for side in images_BCHW.shape[2:])
        quarters = (np.s_[:, :, :middle, half:], np.s_[:, :, middle:, :half], np.s_[:, :, middle:, half:])
        for number, quarter in enumerate(quarters, start=1):
            images_BCHW[quarter] = self.train.data_NCHW[rows_B4[:, number]][quarter]
        return images_BCHW

    def _neighbour_clusters(self, seen: Seen) -> np.ndarray:
        return self.real.cluster_M[nearest(self.real.features_MD, seen.features_ND)]

    def _distances(self, features_MD: np.ndarray) -> tuple[dict[str, Any], np.ndarray]:
        frechet, pull_M = self.real.gaussian.measure(features_MD)
        distance, spread = kid(self.real.features_MD, features_MD, self.seed)
        return {
            "frechet": frechet,
            "frechet_std": deviation(pull_M),
            "kid": distance,
            "kid_std": spread,
        }, pull_M

    def _cluster_tv(self, cluster_M: np.ndarray, label_M: np.ndarray) -> float:
        num_clusters = self.prior_CK.shape[1]
        share_K = np.bincount(cluster_M, minlength=num_clusters) / len(cluster_M)
        return total_variation(share_K, self.prior_CK[label_M].mean(0))
