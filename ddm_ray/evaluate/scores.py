"""Scores of one model's samples, measured against the run's real rows.

Shapes: N real training rows, M samples, C classes and the null one, K clusters.
"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ddm_ray.data.loading.loader import Rows
from ddm_ray.evaluate.distances import frechet, frechet_std, nearest, precision_recall, total_variation
from ddm_ray.evaluate.features import FeatureNet, Seen, see


@dataclass(frozen=True)
class Score:
    """One row of the table, of `n` images. None: not measured for this row.

    Frechet distance and its bootstrap standard deviation; the classifier's accuracy, precision and recall in
    [0, 1]; `cluster_tv`: total variation, in [0, 1], between the clusters and those expected from the labels.
    """

    n: int
    frechet: float
    frechet_std: float
    accuracy: float | None
    precision: float | None
    recall: float | None
    cluster_tv: float


@dataclass(frozen=True)
class Reference:
    """The real rows, as the classifier sees them: everything is compared with these."""

    net: FeatureNet
    train: Rows
    train_seen: Seen
    prior_CK: np.ndarray
    seed: int

    def score(self, images_MCHW: Tensor, label_M: Tensor) -> Score:
        """The score of images in [-1, 1] that were sampled with these labels.

        An image counts as of the cluster of its nearest real row in feature space.
        """
        seen = see(self.net, images_MCHW)
        cluster_M = self._neighbour_clusters(seen)
        precision, recall = precision_recall(self.train_seen.features_ND, seen.features_ND)
        return Score(
            n=len(images_MCHW),
            **self._frechet(seen.features_ND),
            accuracy=seen.accuracy(label_M.numpy()),
            precision=precision,
            recall=recall,
            cluster_tv=self._cluster_tv(cluster_M, label_M.numpy()),
        )

    def neighbour_clusters(self, images_MCHW: Tensor) -> np.ndarray:
        """The cluster (M,), int64, of each image's nearest real row in feature space; images in [-1, 1]."""
        return self._neighbour_clusters(see(self.net, images_MCHW))

    def floor(self, n: int) -> Score:
        """The score of `n` real rows, drawn with replacement: about the best that a sampler can reach."""
        rows_M = np.random.default_rng(self.seed).integers(len(self.train), size=n)
        label_M, cluster_M = self.train.label_N.numpy()[rows_M], self.train.cluster_N.numpy()[rows_M]
        distance = self._frechet(self.train_seen.features_ND[rows_M])
        return Score(
            n=n,
            **distance,
            accuracy=None,
            precision=None,
            recall=None,
            cluster_tv=self._cluster_tv(cluster_M, label_M),
        )

    def _neighbour_clusters(self, seen: Seen) -> np.ndarray:
        return self.train.cluster_N.numpy()[nearest(self.train_seen.features_ND, seen.features_ND)]

    def _frechet(self, features_MD: np.ndarray) -> dict[str, float]:
        real_ND = self.train_seen.features_ND
        return {
            "frechet": frechet(real_ND, features_MD),
            "frechet_std": frechet_std(real_ND, features_MD, self.seed),
        }

    def _cluster_tv(self, cluster_M: np.ndarray, label_M: np.ndarray) -> float:
        num_clusters = self.prior_CK.shape[1]
        share_K = np.bincount(cluster_M, minlength=num_clusters) / len(cluster_M)
        return total_variation(share_K, self.prior_CK[label_M].mean(0))
