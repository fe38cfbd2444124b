"""Another ruler: the Fréchet distance in the features of small classifiers, which learn a study's classes themselves.

Their features count most what they tell classes by, and how much depends on each one's seed: so there are several.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ddm_ray.data.loading.loader import Rows
from ddm_ray.evaluate.distances import Gaussian, total_variation
from ddm_ray.evaluate.samples import one_thread

SEEDS = (0, 1, 2)
FEATURES = 64
WIDTHS = (32, 64, 64)
BATCH, EPOCHS, LEARNING_RATE = 128, 8, 1e-3


@dataclass(frozen=True, eq=False)
class ClassifierRuler:
    """A small classifier, and what it makes of all real training rows: N rows, D features, L classes."""

    net: nn.Sequential
    gaussian: Gaussian
    share_L: np.ndarray

    @classmethod
    def of(cls, rows: Rows, seed: int) -> Self:
        """Train it on rows and their classes; `seed` draws its weights and the order of rows."""
        net = classifier(rows, seed)
        features_ND, share_L = seen(net, rows.data_NCHW)
        return cls(net, Gaussian.of(features_ND), share_L)

    def score(self, images_MCHW: Tensor) -> dict[str, float]:
        """The Fréchet distance of images to the rows, and the total variation, in [0, 1], of the classes it sees."""
        features_MD, share_L = seen(self.net, images_MCHW)
        return {"frechet": self.gaussian.distance(features_MD), "tv": total_variation(share_L, self.share_L)}


def classifier(rows: Rows, seed: int) -> nn.Sequential:
    """A network of three convolutions, features (D,) and logits (L,), trained by Adam for some passes over rows."""
    num_classes = int(rows.label_N.max()) + 1
    with torch.random.fork_rng([]), one_thread():
        torch.manual_seed(seed)
        layers, channels = list[nn.Module](), rows.data_NCHW.shape[1]
        for place, width in enumerate(WIDTHS):
            layers += [nn.Conv2d(channels, width, 3, stride=2 if place else 1, padding=1), nn.SiLU()]
            channels = width
        layers += [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels, FEATURES), nn.SiLU()]
        net = nn.Sequential(*layers, nn.Linear(FEATURES, num_classes))
        optimizer = torch.optim.Adam(net.parameters(), LEARNING_RATE)
        for _ in range(EPOCHS):
            for row_B in torch.randperm(len(rows.label_N)).split(BATCH):
                optimizer.zero_grad()
                cross_entropy(net(rows.data_NCHW[row_B]), rows.label_N[row_B]).backward()
                optimizer.step()
    return net.eval()


@torch.inference_mode()
def seen(net: nn.Sequential, images_MCHW: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Features (M, D) of images, and the share of them that each class is the likeliest of (L,)."""
    with one_thread():
        features = torch.cat([net[:-1](part_BCHW) for part_BCHW in images_MCHW.split(BATCH)])
        logits_ML = net[-1](features)
    share_L = torch.bincount(logits_ML.argmax(1), minlength=logits_ML.shape[1]) / len(images_MCHW)
    return features.double().numpy(), share_L.double().numpy()


def scores(rulers: Sequence[ClassifierRuler], images_MCHW: Tensor) -> dict[str, Any]:
    """Scores of images, one by each classifier."""
    every = [ruler.score(images_MCHW) for ruler in rulers]
    return {field: [each[field] for each in every] for field in every[0]}
