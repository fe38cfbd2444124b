"""A mixture of Gaussians on any path: every exact prediction, its router and its score in closed form.

Shapes: B rows, K components, D dimensions; images are (B, 1, 1, D).
"""

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from ddm_ray.core.flow import PATHS, PREDICTIONS, Flow

PAIRS = [Flow(path, prediction) for path in PATHS for prediction in PREDICTIONS]


@dataclass(frozen=True)
class PathMixture:
    """Data ~ sum_k weight_K N(mean_KD, std_K^2); float64. `of(k)` is component k alone."""

    weight_K: Tensor
    mean_KD: Tensor
    std_K: Tensor

    @classmethod
    def random(cls, seed: int, num_components: int, dimensions: int, std: tuple[float, float] = (0.2, 2)):
        numbers = np.random.default_rng(seed)
        weight_K = numbers.dirichlet(np.full(num_components, 2.0))
        mean_KD = 1.5 * numbers.standard_normal((num_components, dimensions))
        return cls(*map(torch.from_numpy, (weight_K, mean_KD, numbers.uniform(*std, num_components))))

    def of(self, k: int) -> "PathMixture":
        return PathMixture(torch.ones(1, dtype=torch.float64), self.mean_KD[[k]], self.std_K[[k]])

    def points(self, seed: int, num_rows: int, t_B: Tensor) -> Tensor:
        """x_BD of the linear path at t_B."""
        numbers = np.random.default_rng(seed)
        k_B = torch.from_numpy(numbers.choice(len(self.weight_K), num_rows, p=self.weight_K.numpy()))
        noise_BD = torch.from_numpy(numbers.standard_normal((2, num_rows, self.mean_KD.shape[1])))
        data_BD = self.mean_KD[k_B] + self.std_K[k_B, None] * noise_BD[0]
        return (1 - t_B)[:, None] * data_BD + t_B[:, None] * noise_BD[1]

    def log_joint(self, x_BD: Tensor, alpha_B: Tensor, sigma_B: Tensor) -> Tensor:
        """log weight_k p(x | k), (B, K), without the constant."""
        variance_BK = alpha_B[:, None] ** 2 * self.std_K**2 + sigma_B[:, None] ** 2
        squares_BK = (x_BD[:, None] - alpha_B[:, None, None] * self.mean_KD).square().sum(2)
        return self.weight_K.log() - squares_BK / (2 * variance_BK) - x_BD.shape[1] / 2 * variance_BK.log()

    def means(self, x_BD: Tensor, alpha_B: Tensor, sigma_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """E[data | x], E[noise | x] and the score at x = alpha data + sigma noise, finite for any alpha, sigma."""
        posterior_BK1 = self.log_joint(x_BD, alpha_B, sigma_B).softmax(1)[:, :, None]
        alpha, sigma = alpha_B[:, None, None], sigma_B[:, None, None]
        variance_K1 = self.std_K[:, None] ** 2
        centred_BKD = (x_BD[:, None] - alpha * self.mean_KD) / (alpha**2 * variance_K1 + sigma**2)
        data_BKD = self.mean_KD + alpha * variance_K1 * centred_BKD
        return tuple((posterior_BK1 * part).sum(1) for part in (data_BKD, sigma * centred_BKD, -centred_BKD))

    def linear_velocity(self, x_BD: Tensor, t_B: Tensor) -> Tensor:
        data_BD, noise_BD, _ = self.means(x_BD, 1 - t_B, t_B)
        return noise_BD - data_BD


class ExactNetwork(nn.Module):
    """What training on `flow` would give in the end. Images (B, 1, 1, D), any condition."""

    def __init__(self, mixture: PathMixture, flow: Flow) -> None:
        super().__init__()
        self.mixture, self.flow = mixture, flow

    def forward(self, x_BCHW: Tensor, t_B: Tensor, condition: Tensor | None = None) -> Tensor:
        path = PATHS[self.flow.path]
        data_BD, noise_BD, score_BD = self.mixture.means(x_BCHW.flatten(1), path.alpha(t_B), path.sigma(t_B))
        velocity_BD = path.alpha_slope(t_B)[:, None] * data_BD + path.sigma_slope(t_B)[:, None] * noise_BD
        predictions = {"velocity": velocity_BD, "noise": noise_BD, "data": data_BD, "score": score_BD}
        return predictions[self.flow.prediction].view_as(x_BCHW)


class ExactRouter(nn.Module):
    """Logits of the components' posterior on `path`."""

    def __init__(self, mixture: PathMixture, path: str) -> None:
        super().__init__()
        self.mixture, self.path = mixture, PATHS[path]

    def forward(self, x_BCHW: Tensor, t_B: Tensor, condition: Tensor | None = None) -> Tensor:
        return self.mixture.log_joint(x_BCHW.flatten(1), self.path.alpha(t_B), self.path.sigma(t_B))


def as_images(x_BD: Tensor) -> Tensor:
    return x_BD[:, None, None, :]


def relative(actual: Tensor, right: Tensor) -> float:
    """Worst difference of a row over the norm of what is right."""
    return float(((actual - right).flatten(1).norm(dim=1) / right.flatten(1).norm(dim=1)).max())


def mixtures(std: tuple[float, float] = (0.2, 2)) -> st.SearchStrategy[PathMixture]:
    return st.builds(
        PathMixture.random,
        seed=st.integers(0, 2**32),
        num_components=st.integers(1, 5),
        dimensions=st.integers(1, 6),
        std=st.just(std),
    )
