"""Diagnostics of the router: its accuracy on noised held-out rows, and the trajectories of images that it routes.

Shapes: B noised rows or images, K experts, S steps of a trajectory, M bins of confidence.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddm_ray.core.calibration import cross_entropy, fit_temperature
from ddm_ray.core.routing import parse_strategy
from ddm_ray.data.loading.loader import Rows
from ddm_ray.evaluate.candidates import Decode
from ddm_ray.evaluate.image_set import Reference
from ddm_ray.evaluate.losses import BINS, CHUNK, Noised
from ddm_ray.sampling.request import SampleRequest
from ddm_ray.sampling.run_models import Models
from ddm_ray.sampling.trace import num_switches

CONFIDENCE_BINS = 15
MAX_IMAGES = 256
"""Images per strategy with a recorded trajectory: enough for shares with a standard error of at most 3 points."""


@dataclass(frozen=True)
class PosteriorScore:
    """The router's posterior on `n` rows with known clusters.

    `accuracy`: share of rows, in [0, 1], with their own cluster as the likeliest. `cross_entropy`, and the
    posterior's mean `entropy`, are in nats. `ece` and `ece_floor`, in [0, 1]: see `calibration_error`.
    """

    n: int
    accuracy: float
    cross_entropy: float
    entropy: float
    ece: float
    ece_floor: float


@dataclass(frozen=True)
class Shares:
    """Each expert's share: its cluster's share of the training rows and of the held-out rows, and the router's.

    The router's is the mean `posterior` over held-out rows, or the share of rows with the expert as the `likeliest`.
    """

    training: list[float]
    heldout: list[float]
    posterior: list[float]
    likeliest: list[float]


@dataclass(frozen=True)
class RouterScore(PosteriorScore):
    """The router on noised held-out rows with their conditions, over uniform t and `by_t` in tenths (None: no row).

    `fitted_cross_entropy`: in nats, at the best-fitting `temperature`; a calibrated router has temperature 1.
    `prior_accuracy`, `prior_entropy`: those of p(k|c), which depends on a row's condition and not on its image.
    `confusion`: row counts, one line per true cluster, one column per likeliest cluster.
    """

    temperature: float
    fitted_cross_entropy: float
    prior_accuracy: float
    prior_entropy: float
    by_t: list[PosteriorScore | None]
    confusion: list[list[int]]
    shares: Shares


@dataclass(frozen=True)
class TrajectoryScore:
    """The trajectories of `n` images under a strategy that uses one expert at a time.

    `switches`: mean number of changes of the expert per image. `steady`: share of images without a change. `last`:
    each expert's share of the last steps. An image's neighbour is the nearest training row in the evaluation's
    features. `aligned`: share of images with a neighbour in the cluster of their last expert. `chance`: that share if
    all training rows of the image's condition were equally likely to be its neighbour.
    """

    strategy: str
    n: int
    switches: float
    steady: float
    last: list[float]
    aligned: float
    chance: float


def router_diagnostics(
    mixture: Models,
    heldout: Rows,
    request: SampleRequest,
    strategies: Sequence[str],
    reference: Reference,
    decode: Decode,
) -> dict[str, Any] | None:
    """RouterScore as a dict, with the `trajectories` of strategies that use one expert at a time.

    None if there is no router, or fewer than two held-out rows.

    The trajectories are those of the request's first MAX_IMAGES images. `heldout_aligned`, for comparison: share of
    held-out rows with a neighbour of their own cluster. Samples may have more, since they are more typical than rows.
    """
    if mixture.router is None or len(heldout) < 2:
        return None
    score = router_score(mixture, heldout, reference.seed)
    few, num_experts, trajectories = request.rows(slice(MAX_IMAGES)), mixture.info.num_experts, []
    # A text's prior is p(k), the only row of the table.
    label_B = few.condition if isinstance(few.condition, Tensor) else torch.zeros(len(few.seeds), dtype=torch.int64)
    prior_BK = reference.prior_CK[label_B]
    for strategy in strategies:
        if parse_strategy(strategy, num_experts).most(num_experts) == 1:
            sampled = mixture.sample(few.changed(strategy=strategy))
            neighbour_B = reference.neighbour_clusters(decode(sampled.images_BCHW))
            trajectories.append(asdict(trajectory_score(strategy, sampled.routing_SBK, neighbour_B, prior_BK)))
    aligned_B = reference.neighbour_clusters(decode(heldout.data_NCHW)) == heldout.cluster_N.numpy()
    return asdict(score) | {"heldout_aligned": float(aligned_B.mean()), "trajectories": trajectories}


@torch.inference_mode()
def router_score(mixture: Models, heldout: Rows, seed: int, times_per_row: int = 16) -> RouterScore:
    """The router's score on held-out rows, without `sample.router_temperature`."""
    noised = Noised.of(heldout, seed, times_per_row)
    assert mixture.router is not None
    assert mixture.info.prior_CK is not None
    logits_BK = torch.cat(
        [
            mixture.router(*noised.inputs(chunk_B, mixture.device)).cpu()
            for chunk_B in torch.arange(len(noised.t_B)).split(CHUNK)
        ]
    )
    cluster_B = heldout.cluster_N[noised.rows_B].long()
    return score_of(logits_BK, cluster_B, noised.t_B, mixture.info.prior_CK, heldout.label_N[noised.rows_B])


def score_of(logits_BK: Tensor, cluster_B: Tensor, t_B: Tensor, prior_CK: Tensor, label_B: Tensor) -> RouterScore:
    """The score of logits, given the rows' true clusters, times and labels.

    `prior_CK`: p(k|c) among training rows; its last row is p(k).
    """
    prior_BK = prior_CK[label_B].double()
    temperature = fit_temperature(logits_BK, cluster_B)
    confusion_KK = confusion(logits_BK, cluster_B)
    by_true_K, by_likeliest_K = (confusion_KK.sum(dim=dim).double() / len(cluster_B) for dim in (1, 0))
    return RouterScore(
        **asdict(posterior_score(logits_BK, cluster_B)),
        temperature=temperature,
        fitted_cross_entropy=cross_entropy(logits_BK, cluster_B, temperature),
        prior_accuracy=float((prior_BK.argmax(dim=1) == cluster_B).double().mean()),
        prior_entropy=_entropy(prior_BK),
        by_t=scores_by_t(logits_BK, cluster_B, t_B),
        confusion=confusion_KK.tolist(),
        shares=Shares(
            training=prior_CK[-1].tolist(),
            heldout=by_true_K.tolist(),
            posterior=logits_BK.double().softmax(dim=1).mean(dim=0).tolist(),
            likeliest=by_likeliest_K.tolist(),
        ),
    )


def posterior_score(logits_BK: Tensor, cluster_B: Tensor) -> PosteriorScore:
    """The score of the logits of at least one row, given the rows' true clusters."""
    posterior_BK = logits_BK.double().softmax(dim=1)
    correct_B = logits_BK.argmax(dim=1) == cluster_B
    ece, ece_floor = calibration_error(posterior_BK.amax(dim=1), correct_B)
    return PosteriorScore(
        n=len(cluster_B),
        accuracy=float(correct_B.double().mean()),
        cross_entropy=cross_entropy(logits_BK, cluster_B),
        entropy=_entropy(posterior_BK),
        ece=ece,
        ece_floor=ece_floor,
    )


def scores_by_t(logits_BK: Tensor, cluster_B: Tensor, t_B: Tensor) -> list[PosteriorScore | None]:
    """The scores in each tenth of t; None for a tenth without rows."""
    tenth_B = (t_B * BINS).long().clamp(max=BINS - 1)
    inside = [tenth_B == tenth for tenth in range(BINS)]
    return [posterior_score(logits_BK[own_B], cluster_B[own_B]) if own_B.any() else None for own_B in inside]


def calibration_error(confidence_B: Tensor, correct_B: Tensor) -> tuple[float, float]:
    """The expected calibration error, and its floor: about the error of a calibrated router with these confidences.

    In CONFIDENCE_BINS equal bins of confidence that include their upper end (Guo et al. 2017, arXiv 1706.04599,
    section 2): the gap between mean confidence and accuracy, weighted by the bin's rows. A few rows are never right
    in exactly their share, hence the floor. It uses the normal approximation, and treats all rows as independent.
    """
    bin_B = (confidence_B * CONFIDENCE_BINS).ceil().long().clamp(1, CONFIDENCE_BINS) - 1
    gap_M = torch.bincount(bin_B, correct_B.double() - confidence_B, CONFIDENCE_BINS).abs()
    variance_M = torch.bincount(bin_B, confidence_B * (1 - confidence_B), CONFIDENCE_BINS)
    # The mean absolute value of a centred normal variable is its standard deviation times sqrt(2 / pi).
    chance_M = (2 / math.pi * variance_M).sqrt()
    return float(gap_M.sum() / len(bin_B)), float(chance_M.sum() / len(bin_B))


def confusion(logits_BK: Tensor, cluster_B: Tensor) -> Tensor:
    """Row counts (K, K), int64: one line per true cluster, one column per likeliest cluster."""
    num_experts = logits_BK.shape[1]
    cell_B = cluster_B * num_experts + logits_BK.argmax(dim=1)
    return torch.bincount(cell_B, minlength=num_experts**2).view(num_experts, num_experts)


def trajectory_score(
    strategy: str, routing_SBK: Tensor, neighbour_B: np.ndarray, prior_BK: np.ndarray
) -> TrajectoryScore:
    """The score of images by their experts' weights at each step, their neighbours' clusters, and p(k|c) of each."""
    switches_B, last_B = np.array(num_switches(routing_SBK)), routing_SBK[-1].argmax(dim=1).numpy()
    count = len(last_B)
    return TrajectoryScore(
        strategy=strategy,
        n=count,
        switches=float(switches_B.mean()),
        steady=float((switches_B == 0).mean()),
        last=(np.bincount(last_B, minlength=prior_BK.shape[1]) / count).tolist(),
        aligned=float((last_B == neighbour_B).mean()),
        chance=float(prior_BK[np.arange(count), last_B].mean()),
    )


def _entropy(probs_BK: Tensor) -> float:
    return float(torch.special.entr(probs_BK).sum(dim=1).mean())
