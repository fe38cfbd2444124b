"""A forecast without training: how much lower the loss of exact Gaussian denoisers is, one a cluster, than of one.

A cluster's Gaussian has its rows' mean and covariance (shrunk as Ledoit and Wolf do), and its denoiser is linear, so
that seconds tell what a partition is worth to models that know no more of the data than that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from sklearn.covariance import ledoit_wolf
from torch import Tensor, nn

from ddm_ray.evaluate.losses import heldout_losses
from ddm_ray.evaluate.real_rows import RealRows
from ddm_ray.evaluate.samples import one_thread
from ddm_ray.run.run import Run
from ddm_ray.sampling.request import MixtureInfo
from ddm_ray.sampling.run_models import Models

FLAT = 1e-12
"""Least variance along an axis at t = 0."""


@dataclass(frozen=True, eq=False)
class GaussianDenoiser:
    """The velocity E[noise - data | x_t = x] of a Gaussian, by its mean and its covariance's axes; D = C H W."""

    mean_D: Tensor
    values_D: Tensor
    vectors_DD: Tensor

    @classmethod
    def of(cls, rows_NCHW: Tensor) -> Self:
        """Fit to rows."""
        rows_ND = rows_NCHW.flatten(1).double().numpy()
        covariance_DD, _ = ledoit_wolf(rows_ND)
        values_D, vectors_DD = np.linalg.eigh(covariance_DD)
        return cls(*(torch.from_numpy(part) for part in (rows_ND.mean(0), values_D.clip(min=0), vectors_DD)))

    def __call__(self, x_BCHW: Tensor, t_B: Tensor, condition: object) -> Tensor:
        """Velocities (B, C, H, W), whatever the condition."""
        along_BD, variance_BD, t_B1 = self._along(x_BCHW, t_B)
        slope_BD = (t_B1 - (1 - t_B1) * self.values_D) / variance_BD
        velocity_BD = (slope_BD * along_BD) @ self.vectors_DD.T - self.mean_D
        return velocity_BD.view(x_BCHW.shape).to(x_BCHW.dtype)

    def log_density(self, x_BCHW: Tensor, t_B: Tensor) -> Tensor:
        """log p_t(x) (B,), but for a constant that is any Gaussian's of as many dimensions."""
        along_BD, variance_BD, _ = self._along(x_BCHW, t_B)
        return -(along_BD**2 / variance_BD + variance_BD.log()).sum(1) / 2

    def _along(self, x_BCHW: Tensor, t_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Along the axes: x about its mean at t, and its variance there, (B, D); and t as (B, 1)."""
        x_BD, t_B1 = x_BCHW.flatten(1).double(), t_B.double()[:, None]
        along_BD = (x_BD - (1 - t_B1) * self.mean_D) @ self.vectors_DD
        return along_BD, ((1 - t_B1) ** 2 * self.values_D + t_B1**2).clamp(min=FLAT), t_B1


class GaussianRouter(nn.Module):
    """The exact p(k | x_t, t) of Gaussians with these shares, as logits."""

    def __init__(self, gaussians: Sequence[GaussianDenoiser], share_K: Tensor):
        super().__init__()
        self.gaussians, self.share_K = gaussians, share_K

    def forward(self, x_BCHW: Tensor, t_B: Tensor, condition: object) -> Tensor:
        """Logits (B, K)."""
        logits_BK = torch.stack([each.log_density(x_BCHW, t_B) for each in self.gaussians], dim=1)
        logits_BK = logits_BK + self.share_K.log()
        return (logits_BK - logits_BK.amax(dim=1, keepdim=True)).to(x_BCHW.dtype)


def forecast(run: Run, seed: int) -> dict[str, float]:
    """Held-out losses of one denoiser, of the mixture of the run's clusters', and of each row's own cluster's alone."""
    rows = RealRows.of(run)
    train, clusters = rows.train, run.config.partition.num_clusters
    gaussians = tuple(GaussianDenoiser.of(train.data_NCHW[train.cluster_N == cluster]) for cluster in range(clusters))
    router = GaussianRouter(gaussians, torch.bincount(train.cluster_N.long(), minlength=clusters) / len(train))
    shape = run.config.data.shape
    mixture = Models(MixtureInfo(clusters, shape, None, None), gaussians, router)
    monolith = Models(MixtureInfo(1, shape, None, None), (GaussianDenoiser.of(train.data_NCHW),), None)
    with one_thread():
        losses = heldout_losses(mixture, {"monolith": monolith}, rows.heldout, ("full",), seed)
    return {loss.model: loss.loss for loss in losses}
