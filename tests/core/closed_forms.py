"""Mixtures whose experts, router and answers are known in closed form.

Shapes: B rows, N data points, D dimensions, K experts, C conditions (classes and the null one).
"""

from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor

from ddm_ray.core import flow
from ddm_ray.core.condition import Text
from ddm_ray.sampling.request import MixtureInfo


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

    def log_weights(self, x_BD: Tensor, t_B: Tensor, label_B: Tensor, of_N: Tensor | slice) -> Tensor:
        """-|x - (1-t) point|^2 / 2 t^2 of the points chosen by `of_N`, -inf where the label differs."""
        squares_BN = ((x_BD[:, None] - (1 - t_B)[:, None, None] * self.points_ND[of_N]) ** 2).sum(dim=2)
        allowed_BN = (label_B[:, None] == self.num_classes) | (label_B[:, None] == self.label_N[of_N])
        return (-squares_BN / (2 * t_B[:, None] ** 2)).masked_fill(~allowed_BN, -torch.inf)

    def field_of(self, cluster: int | None):
        """Velocity field of one cluster, or of all the data (None); x / t where no point has the label."""
        of_N = slice(None) if cluster is None else self.cluster_N == cluster

        def field(x_BCHW: Tensor, t_B: Tensor, label_B: Tensor) -> Tensor:
            x_BD, t_B = x_BCHW.double().flatten(1), t_B.double().clamp(min=self.t_floor)
            weights_BN = self.log_weights(x_BD, t_B, label_B, of_N).softmax(dim=1).nan_to_num()
            velocity_BD = (x_BD - weights_BN @ self.points_ND[of_N]) / t_B[:, None]
            return velocity_BD.view_as(x_BCHW).to(x_BCHW.dtype)

        return field

    def router(self, x_BCHW: Tensor, t_B: Tensor, label_B: Tensor) -> Tensor:
        x_BD, t_B = x_BCHW.double().flatten(1), t_B.double().clamp(min=self.t_floor)
        log_BN = self.log_weights(x_BD, t_B, label_B, slice(None))
        log_BN = log_BN - log_BN.amax(dim=1, keepdim=True)
        per_expert = [
            log_BN.masked_fill(self.cluster_N != k, -torch.inf).logsumexp(dim=1) for k in range(self.num_experts)
        ]
        return torch.stack(per_expert, dim=1)


class GaussianMixture:
    """Isotropic Gaussians in images (1, 1, D); expert k is component k, p(k|c) is row c of prior_CK.

    Component k of condition c is N(mean_CKD[c, k], std_CK[c, k]^2); what lacks the C is the same for all.
    """

    def __init__(self, prior_CK: Tensor, mean_KD: Tensor, std_K: Tensor) -> None:
        num_conditions, num_experts = prior_CK.shape
        self.prior_CK = prior_CK
        self.mean_CKD = mean_KD.expand(num_conditions, num_experts, mean_KD.shape[-1])
        self.std_CK = std_K.expand(num_conditions, num_experts)
        self.shape = (1, 1, mean_KD.shape[-1])
        self.experts = [self.field_of(k) for k in range(num_experts)]

    def info(self, dtype: torch.dtype = torch.float64) -> MixtureInfo:
        num_conditions, num_experts = self.prior_CK.shape
        return MixtureInfo(num_experts, self.shape, num_conditions - 1, self.prior_CK, dtype=dtype)

    def field_of(self, k: int):
        def field(x_BCHW: Tensor, t_B: Tensor, label_B: Tensor) -> Tensor:
            t = flow.append_dims(t_B, x_BCHW)
            mean = self.mean_CKD[label_B, k].view(-1, *self.shape)
            variance = flow.append_dims(self.std_CK[label_B, k] ** 2, x_BCHW)
            centred = (x_BCHW - (1 - t) * mean) / ((1 - t) ** 2 * variance + t**2)
            return t * centred - mean - (1 - t) * variance * centred

        return field

    def log_density(self, x_BD: Tensor, t_B: Tensor, label_B: Tensor) -> Tensor:
        """log p(x|k,t,c), (B, K), without the constant that all share."""
        variance_BK = (1 - t_B)[:, None] ** 2 * self.std_CK[label_B] ** 2 + t_B[:, None] ** 2
        squares_BK = ((x_BD[:, None] - (1 - t_B)[:, None, None] * self.mean_CKD[label_B]) ** 2).sum(dim=2)
        return -squares_BK / (2 * variance_BK) - x_BD.shape[1] / 2 * variance_BK.log()

    def router(self, x_BCHW: Tensor, t_B: Tensor, label_B: Tensor) -> Tensor:
        return self.prior_CK[label_B].log() + self.log_density(x_BCHW.flatten(1), t_B, label_B)

    def score(self, x_BD: Tensor, t_B: Tensor, label_B: Tensor, expert: int | None = None) -> Tensor:
        """The gradient of log p(x|t,c), of one component or of all, by differentiating the closed-form density."""
        x_BD = x_BD.detach().requires_grad_()
        with torch.enable_grad():
            log_BK = self.log_density(x_BD, t_B, label_B)
            joint_BK = self.prior_CK[label_B].log() + log_BK
            log_B = joint_BK.logsumexp(dim=1) if expert is None else log_BK[:, expert]
            (score_BD,) = torch.autograd.grad(log_B.sum(), x_BD)
        return score_BD

    def velocity(self, x_BD: Tensor, t: float, label_B: Tensor) -> Tensor:
        """u = -(x + t score) / (1 - t), for t below 1: owes nothing to the experts' fields or to the router."""
        times_B = torch.full((len(x_BD),), t, dtype=torch.float64)
        return -(x_BD + t * self.score(x_BD, times_B, label_B)) / (1 - t)

    def moments(self, condition: int) -> tuple[Tensor, Tensor]:
        """The true mean (D,) and covariance (D, D) of this condition."""
        weights_K1, mean_KD = self.prior_CK[condition][:, None], self.mean_CKD[condition]
        mean = (weights_K1 * mean_KD).sum(dim=0)
        centred = mean_KD - mean
        variance = (weights_K1[:, 0] * self.std_CK[condition] ** 2).sum()
        return mean, (weights_K1 * centred).T @ centred + variance * torch.eye(len(mean), dtype=torch.float64)

    def frechet(self, images_BCHW: Tensor, condition: int) -> float:
        """Frechet distance between the moments of images and the true ones of this condition."""
        mean, covariance = self.moments(condition)
        images_BD = images_BCHW.flatten(1)
        sampled = torch.cov(images_BD.T)
        cross = torch.linalg.eigvals(covariance @ sampled).real.clamp(min=0).sqrt().sum()
        return float((images_BD.mean(dim=0) - mean).square().sum() + (covariance + sampled).trace() - 2 * cross)


class Texts:
    """A Gaussian mixture whose condition is a text: condition c is a one-hot token among padding full of rubbish.

    `early_router` at t = 1 has the true p(k|c) on average over x, but is sure of a k that x alone decides.
    """

    def __init__(self, system: GaussianMixture) -> None:
        self.system = system
        self.experts = [self._read(expert) for expert in system.experts]
        self.router = self._read(system.router)

    def info(self, null: bool = True) -> MixtureInfo:
        num_conditions, num_experts = self.system.prior_CK.shape
        null_text = self.texts(torch.tensor([num_conditions - 1])) if null else None
        prior_1K = self.system.prior_CK[-1:]
        return MixtureInfo(num_experts, self.system.shape, None, prior_1K, dtype=torch.float64, null_text=null_text)

    def texts(self, label_B: Tensor) -> Text:
        """The text of each label: its token's place among 3, and what pads it, differ from row to row."""
        num_conditions = len(self.system.prior_CK)
        tokens_BLE = 7.0 + torch.arange(3.0).view(1, 3, 1).expand(len(label_B), 3, num_conditions)
        place_B = torch.arange(len(label_B)) % 3
        mask_BL = F.one_hot(place_B, 3).bool()
        one_hot_BE = F.one_hot(label_B, num_conditions).to(tokens_BLE)
        return Text(torch.where(mask_BL[:, :, None], one_hot_BE[:, None], tokens_BLE), mask_BL)

    def early_router(self, x_BCHW: Tensor, t_B: Tensor, text: Text) -> Tensor:
        cdf_BK = self.system.prior_CK[_labels(text)].cumsum(dim=1)
        uniform_B1 = torch.special.ndtr(x_BCHW.flatten(1)[:, :1].contiguous())
        chosen_B = (uniform_B1 > cdf_BK[:, :-1]).sum(dim=1)
        return torch.where(
            t_B[:, None] == 1, 50.0 * F.one_hot(chosen_B, cdf_BK.shape[1]), self.router(x_BCHW, t_B, text)
        )

    @staticmethod
    def _read(field):
        return lambda x_BCHW, t_B, text: field(x_BCHW, t_B, _labels(text))


def _labels(text: Text) -> Tensor:
    assert (text.mask_BL.sum(dim=1) == 1).all()
    return text.tokens_BLE[text.mask_BL].argmax(dim=1)


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


def random_gaussians(seed: int, dim: int, num_experts: int, num_conditions: int) -> GaussianMixture:
    """Any mixture: weights down to e^-4 of the largest or so, stds .2 to 2, means and stds by condition."""
    generator = torch.Generator().manual_seed(seed)
    size = (num_conditions, num_experts)
    prior_CK = torch.randn(size, generator=generator, dtype=torch.float64).softmax(dim=1)
    mean_CKD = 1.5 * torch.randn(*size, dim, generator=generator, dtype=torch.float64)
    std_CK = 0.2 + 1.8 * torch.rand(size, generator=generator, dtype=torch.float64)
    return GaussianMixture(prior_CK, mean_CKD, std_CK)


def random_points(seed: int, dim: int, num_experts: int, num_classes: int, num_points: int = 24) -> FiniteData:
    """Any data set: points, clusters and labels by chance, each cluster and each label there at least once."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(num_points, 1, 1, dim, generator=generator, dtype=torch.float64)
    cluster_N = torch.randint(num_experts, (num_points,), generator=generator)
    label_N = torch.randint(num_classes, (num_points,), generator=generator)
    cluster_N[:num_experts], label_N[:num_classes] = torch.arange(num_experts), torch.arange(num_classes)
    return FiniteData(points, cluster_N, label_N)


@cache
def guided_gaussians() -> GaussianMixture:
    """Two classes and the null one, whose components differ by condition in mean alone.

    Then both branches of an expert have one slope in x, and guidance by w makes of component k exactly
    N(m_k(null) + w (m_k(c) - m_k(null)), s_k^2).
    """
    prior_CK = torch.tensor([[0.2, 0.5, 0.3], [0.6, 0.1, 0.3], [0.4, 0.3, 0.3]], dtype=torch.float64)
    null_KD = torch.tensor([[2.0, 0.0], [-1.5, 1.5], [-1.0, -2.0]], dtype=torch.float64)
    shift_CKD = torch.tensor([[[0.3, 0.4]] * 3, [[0.0, -0.5], [0.4, 0.0], [-0.3, 0.3]], [[0.0, 0.0]] * 3])
    return GaussianMixture(prior_CK, null_KD + shift_CKD.double(), torch.tensor([0.3, 0.25, 0.4], dtype=torch.float64))


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
