"""How good one model's samples are, measured against the run's real rows.

Shapes: N real training rows, M samples, C classes and the null one, K clusters.
"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ddm_ray.data.loader import Rows
from ddm_ray.evaluate.distances import frechet, frechet_std, nearest, precision_recall, total_variation
from ddm_ray.evaluate.features import FeatureNet, Seen, see


@dataclass(frozen=True)
class Score:
    """One row of the table. `n`: images measured. None: not measured for this row.

    Frechet distance and its bootstrap standard deviation; classifier's accuracy, precision and recall in
    [0, 1]; cluster_tv: total variation between the clusters and those that the labels lead to expect.
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
    """The real rows, as the classifier sees them, that everything is compared with."""

    net: FeatureNet
    train: Rows
    train_seen: Seen
    prior_CK: np.ndarray
    seed: int

    def score(self, images_MCHW: Tensor, label_M: Tensor) -> Score:
        """Of images in [-1, 1] that were asked for with these labels.

        An image's cluster is taken to be that of its nearest real row in feature space.
        """
        seen = see(self.net, images_MCHW)
        cluster_M = self.train.cluster_N.numpy()[nearest(self.train_seen.features_ND, seen.features_ND)]
        precision, recall = precision_recall(self.train_seen.features_ND, seen.features_ND)
        return Score(
            n=len(images_MCHW),
            **self._frechet(seen.features_ND),
            accuracy=seen.accuracy(label_M.numpy()),
            precision=precision,
            recall=recall,
            cluster_tv=self._cluster_tv(cluster_M, label_M.numpy()),
        )

    def floor(self, n: int) -> Score:
        """Of `n` of the real rows themselves, drawn with replacement: about what a perfect sampler gets."""
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

    def _frechet(self, features_MD: np.ndarray) -> dict[str, float]:
        real_ND = self.train_seen.features_ND
        return {
            "frechet": frechet(real_ND, features_MD),
            "frechet_std": frechet_std(real_ND, features_MD, self.seed),
        }

    def _cluster_tv(self, cluster_M: np.ndarray, label_M: np.ndarray) -> float:
        num_clusters = self.prior_CK.shape[1]
        found_K = np.bincount(cluster_M, minlength=num_clusters) / len(cluster_M)
        return total_variation(found_K, self.prior_CK[label_M].mean(0))
