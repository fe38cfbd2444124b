"""Mixtures whose experts, router and answers are known in closed form.

Shapes: B rows, N data points, D dimensions, K experts, C conditions (classes and the null one).
"""

from functools import cache

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor

from ddm_ray.core import flow
from ddm_ray.sampling.trajectory import MixtureInfo


class FiniteData:
    """A data set of N images as the whole distribution: exact velocities and posteriors.

    Below `t_floor` the field is evaluated at it, since its limit at t = 0 is 0 / 0.
    """

    def __init__(self, points_NCHW: Tensor, cluster_N: Tensor, label_N: Tensor, t_floor: float = 0.02) -> None:
        self.shape = tuple(points_NCHW.shape[1:])
        self.points_ND = points_NCHW.double().flatten(1)
        self.cluster_N, self.label_N, self.t_floor = cluster_N, label_N, t_floor
        self.num_experts, self.num_classes = int(cluster_N.max()) + 1, int(label_N.max()) + 1
        self.experts = [self.field_of(k) for k in range(self.num_experts)]

    def info(self, dtype: torch.dtype = torch.float64) -> MixtureInfo:
        counts_CK = torch.zeros(self.num_classes + 1, self.num_experts)
        counts_CK.index_put_((self.label_N, self.cluster_N), torch.ones(len(self.label_N)), accumulate=True)
        counts_CK[-1] = counts_CK.sum(dim=0)
        prior_CK = counts_CK.double() / counts_CK.sum(dim=1, keepdim=True)
        return MixtureInfo(self.num_experts, self.shape, self.num_classes, prior_CK, dtype=dtype)

    def monolith_info(self, dtype: torch.dtype = torch.float64) -> MixtureInfo:
        prior_CK = torch.ones(self.num_classes + 1, 1, dtype=torch.float64)
        return MixtureInfo(1, self.shape, self.num_classes, prior_CK, dtype=dtype)

    def _log_weights(self, x_BD: Tensor, t_B: Tensor, label_B: Tensor, of_N: Tensor | slice) -> Tensor:
        """-|x - (1-t) point|^2 / 2 t^2 of the points chosen by `of_N`, -inf where the label differs."""
        squares_BN = ((x_BD[:, None] - (1 - t_B)[:, None, None] * self.points_ND[of_N]) ** 2).sum(dim=2)
        allowed_BN = (label_B[:, None] == self.num_classes) | (label_B[:, None] == self.label_N[of_N])
        return (-squares_BN / (2 * t_B[:, None] ** 2)).masked_fill(~allowed_BN, -torch.inf)

    def field_of(self, cluster: int | None):
        """Velocity field of one cluster, or of all the data (None); x / t where no point has the label."""
        of_N = slice(None) if cluster is None else self.cluster_N == cluster

        def field(x_BCHW: Tensor, t_B: Tensor, label_B: Tensor) -> Tensor:
            x_BD, t_B = x_BCHW.double().flatten(1), t_B.double().clamp(min=self.t_floor)
            weights_BN = self._log_weights(x_BD, t_B, label_B, of_N).softmax(dim=1).nan_to_num()
            velocity_BD = (x_BD - weights_BN @ self.points_ND[of_N]) / t_B[:, None]
            return velocity_BD.view_as(x_BCHW).to(x_BCHW.dtype)

        return field

    def router(self, x_BCHW: Tensor, t_B: Tensor, label_B: Tensor) -> Tensor:
        x_BD, t_B = x_BCHW.double().flatten(1), t_B.double().clamp(min=self.t_floor)
        log_BN = self._log_weights(x_BD, t_B, label_B, slice(None))
        log_BN = log_BN - log_BN.amax(dim=1, keepdim=True)
        per_expert = [
            log_BN.masked_fill(self.cluster_N != k, -torch.inf).logsumexp(dim=1) for k in range(self.num_experts)
        ]
        return torch.stack(per_expert, dim=1)


class GaussianMixture:
    """Isotropic Gaussians in images (1, 1, D); expert k is component k, p(k|c) is row c of prior_CK."""

    def __init__(self, prior_CK: Tensor, mean_KD: Tensor, std_K: Tensor) -> None:
        self.prior_CK, self.mean_KD, self.std_K = prior_CK, mean_KD, std_K
        self.experts = [self.field_of(k) for k in range(len(std_K))]

    def info(self) -> MixtureInfo:
        num_conditions, num_experts = self.prior_CK.shape
        shape = (1, 1, self.mean_KD.shape[1])
        return MixtureInfo(num_experts, shape, num_conditions - 1, self.prior_CK, dtype=torch.float64)

    def field_of(self, k: int):
        def field(x_BCHW: Tensor, t_B: Tensor, label_B: Tensor) -> Tensor:
            t = flow.along_batch(t_B, x_BCHW)
            mean, variance = self.mean_KD[k].view(1, 1, 1, -1), self.std_K[k] ** 2
            centred = (x_BCHW - (1 - t) * mean) / ((1 - t) ** 2 * variance + t**2)
            return t * centred - mean - (1 - t) * variance * centred

        return field

    def log_joint(self, x_BD: Tensor, t_B: Tensor, label_B: Tensor) -> Tensor:
        """log p(k|c) p(x|k,t), (B, K), without the constant."""
        variance_BK = (1 - t_B)[:, None] ** 2 * self.std_K**2 + t_B[:, None] ** 2
        squares_BK = ((x_BD[:, None] - (1 - t_B)[:, None, None] * self.mean_KD) ** 2).sum(dim=2)
        log_density_BK = -squares_BK / (2 * variance_BK) - x_BD.shape[1] / 2 * variance_BK.log()
        return self.prior_CK[label_B].log() + log_density_BK

    def router(self, x_BCHW: Tensor, t_B: Tensor, label_B: Tensor) -> Tensor:
        return self.log_joint(x_BCHW.flatten(1), t_B, label_B)

    def frechet(self, images_BCHW: Tensor, condition: int) -> float:
        """Frechet distance between the moments of images and the true ones of this condition."""
        weights_K1 = self.prior_CK[condition][:, None]
        mean = (weights_K1 * self.mean_KD).sum(dim=0)
        centred = self.mean_KD - mean
        identity = torch.eye(len(mean), dtype=torch.float64)
        covariance = (weights_K1 * centred).T @ centred + (weights_K1[:, 0] * self.std_K**2).sum() * identity
        images_BD = images_BCHW.flatten(1)
        found = torch.cov(images_BD.T)
        cross = torch.linalg.eigvals(covariance @ found).real.clamp(min=0).sqrt().sum()
        return float((images_BD.mean(dim=0) - mean).square().sum() + (covariance + found).trace() - 2 * cross)


@cache
def digits() -> FiniteData:
    """600 of scikit-learn's digits in [-1, 1], each in the cluster of the nearest of 8, labelled by digit."""
    bunch = load_digits()
    points_ND = torch.from_numpy(bunch.images[:600].copy()).flatten(1) / 8 - 1
    centres = points_ND[torch.from_numpy(np.random.default_rng(0).choice(len(points_ND), 8, replace=False))]
    cluster_N = torch.cdist(points_ND, centres).argmin(dim=1)
    return FiniteData(points_ND.view(-1, 1, 8, 8), cluster_N, torch.from_numpy(bunch.target[:600]).long())


@cache
def three_gaussians() -> GaussianMixture:
    """One class with its own weights, and the marginal .51 / .30 / .19."""
    prior_CK = torch.tensor([[0.1, 0.2, 0.7], [0.51, 0.30, 0.19]], dtype=torch.float64)
    mean_KD = torch.tensor([[1.5, 0.0], [-1.0, 1.2], [-0.8, -1.4]], dtype=torch.float64)
    return GaussianMixture(prior_CK, mean_KD, torch.tensor([0.30, 0.25, 0.35], dtype=torch.float64))


ONE = GaussianMixture(
    torch.ones(1, 1, dtype=torch.float64),
    torch.tensor([[0.7, -0.4]], dtype=torch.float64),
    torch.tensor([0.5], dtype=torch.float64),
)


class PiecewiseConstant:
    """Two experts, of velocity 1 and -3; the router takes the first above t = .5, else the second."""

    experts = (lambda x, t, label: torch.ones_like(x), lambda x, t, label: torch.full_like(x, -3.0))

    def info(self) -> MixtureInfo:
        return MixtureInfo(2, (1, 1, 1), 0, torch.full((1, 2), 0.5, dtype=torch.float64), dtype=torch.float64)

    @staticmethod
    def router(x_BCHW: Tensor, t_B: Tensor, label_B: Tensor) -> Tensor:
        first_B = t_B > 0.5
        return torch.stack([first_B.double() * 2 - 1, 1 - first_B.double() * 2], dim=1)
