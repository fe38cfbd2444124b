"""The router's diagnostics against closed forms, and those of an evaluation against its numbers."""

import json
import math
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ddm_ray.data.loading.loader import Rows, load_rows
from ddm_ray.data.schema import HELDOUT
from ddm_ray.evaluate.losses import BINS
from ddm_ray.evaluate.router import (
    CONFIDENCE_BINS,
    MAX_IMAGES,
    calibration_error,
    confusion,
    posterior_score,
    router_diagnostics,
    router_score,
    score_of,
    scores_by_t,
    trajectory_score,
)
from ddm_ray.evaluate.router_page import router_page
from ddm_ray.run.graph import PARTITION, shard
from ddm_ray.run.info import PartitionInfo
from ddm_ray.run.run import Run
from ddm_ray.sampling.request import MixtureInfo
from ddm_ray.sampling.run_models import Models


def calibrated(count: int, num_experts: int, seed: int = 0, spread: float = 2.0) -> tuple[Tensor, Tensor]:
    """Logits (B, K), float64, and clusters (B,) drawn from their posteriors: what a calibrated router would face."""
    random = torch.Generator().manual_seed(seed)
    logits_BK = spread * torch.randn(count, num_experts, generator=random, dtype=torch.float64)
    cluster_B = torch.multinomial(logits_BK.softmax(dim=1), 1, generator=random)[:, 0]
    return logits_BK, cluster_B


def test_calibrated_logits_have_an_error_near_zero_and_others_a_larger_one() -> None:
    logits_BK, cluster_B = calibrated(40_000, 8)
    score = posterior_score(logits_BK, cluster_B)
    assert score.ece < 0.01 and score.ece < 3 * score.ece_floor
    # The mean of -log p over a calibrated router's own draws is its entropy.
    assert score.cross_entropy == pytest.approx(score.entropy, abs=0.02)
    assert score.accuracy == pytest.approx(float(logits_BK.softmax(dim=1).amax(dim=1).mean()), abs=0.01)
    for mutant_BK in (logits_BK / 3, logits_BK * 3):
        mutant = posterior_score(mutant_BK, cluster_B)
        assert mutant.ece > 0.1 and mutant.ece > 10 * mutant.ece_floor
        assert mutant.accuracy == score.accuracy and mutant.cross_entropy > score.cross_entropy


def test_the_floor_is_the_mean_error_of_calibrated_routers() -> None:
    """The normal approximation, against draws: 300 rows, as many as an evaluation has in a tenth of t."""
    logits_BK, _ = calibrated(300, 4)
    confidence_B = logits_BK.softmax(dim=1).amax(dim=1)
    random = torch.Generator().manual_seed(1)
    draws = torch.rand(1000, 300, generator=random, dtype=torch.float64) < confidence_B
    errors = [calibration_error(confidence_B, correct_B)[0] for correct_B in draws]
    assert calibration_error(confidence_B, draws[0])[1] == pytest.approx(np.mean(errors), rel=0.1)


def test_the_error_is_the_definitions() -> None:
    """Guo et al. 2017, equation 3, bin by bin: bin m is ((m - 1) / M, m / M]."""
    logits_BK, cluster_B = calibrated(500, 5, spread=1.0)
    posterior_BK = logits_BK.softmax(dim=1).numpy()
    error, confidence_B = 0.0, posterior_BK.max(1)
    correct_B = posterior_BK.argmax(1) == cluster_B.numpy()
    for m in range(CONFIDENCE_BINS):
        inside_B = (confidence_B > m / CONFIDENCE_BINS) & (confidence_B <= (m + 1) / CONFIDENCE_BINS)
        if inside_B.any():
            error += inside_B.mean() * abs(correct_B[inside_B].mean() - confidence_B[inside_B].mean())
    assert posterior_score(logits_BK, cluster_B).ece == pytest.approx(error, rel=1e-12)


@pytest.mark.parametrize("num_experts", [1, 2, 7])
def test_a_router_that_knows_nothing_has_the_entropy_of_k_experts(num_experts: int) -> None:
    cluster_B = torch.arange(70) % num_experts
    score = posterior_score(torch.zeros(70, num_experts), cluster_B)
    assert score.entropy == pytest.approx(math.log(num_experts))
    assert score.cross_entropy == pytest.approx(math.log(num_experts))
    assert score.accuracy == pytest.approx(1 / num_experts)
    assert score.ece == pytest.approx(0, abs=1e-12)


def test_a_router_that_is_sure_and_right_has_no_entropy_and_no_error() -> None:
    cluster_B = torch.tensor([2, 0, 1, 1])
    sure_BK = torch.full((4, 3), -math.inf).scatter(1, cluster_B[:, None], 0.0)
    assert asdict(posterior_score(sure_BK, cluster_B)) == {
        "n": 4,
        "accuracy": 1,
        "cross_entropy": 0,
        "entropy": 0,
        "ece": 0,
        "ece_floor": 0,
    }
    assert confusion(sure_BK, cluster_B).tolist() == [[1, 0, 0], [0, 2, 0], [0, 0, 1]]


def test_lines_of_the_confusion_are_true_and_columns_the_likeliest() -> None:
    logits_BK = torch.tensor([[0.0, 3.0], [0.0, 3.0], [1.0, 0.0]])
    assert confusion(logits_BK, torch.tensor([0, 0, 1])).tolist() == [[0, 2], [1, 0]]


def test_each_row_counts_in_its_own_tenth() -> None:
    """A router that is right below t = .35 alone; in the third tenth from the end there is no row."""
    t_B = torch.tensor([t for t in np.arange(200) / 200 if not 0.7 <= t < 0.8] + [1.0])
    right_B = t_B < 0.35
    cluster_B = torch.zeros(len(t_B), dtype=torch.int64)
    logits_BK = torch.where(right_B[:, None], torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))
    by_t = scores_by_t(logits_BK, cluster_B, t_B)
    assert len(by_t) == BINS and by_t[7] is None
    accuracy = [score.accuracy for score in by_t if score]
    assert accuracy == pytest.approx([1, 1, 1, 0.5, 0, 0, 0, 0, 0])
    assert [score.n for score in by_t if score] == [20] * 8 + [21]


@given(seed=st.integers(0, 2**32), num_experts=st.integers(2, 6), count=st.integers(20, 60), data=st.data())
def test_other_numbers_for_the_experts_change_numbers_alone(
    seed: int, num_experts: int, count: int, data: st.DataObject
) -> None:
    order_K = torch.tensor(data.draw(st.permutations(range(num_experts))))
    logits_BK, cluster_B = calibrated(count, num_experts, seed)
    random = torch.Generator().manual_seed(seed)
    t_B, label_B = torch.rand(count, generator=random), torch.randint(3, (count,), generator=random)
    prior_CK = torch.rand(4, num_experts, generator=random, dtype=torch.float64)
    before = score_of(logits_BK, cluster_B, t_B, prior_CK / prior_CK.sum(1, keepdim=True), label_B)
    # Column i is the expert that was order_K[i].
    prior_CK, renumbered_B = prior_CK[:, order_K], order_K.argsort()[cluster_B]
    after = score_of(logits_BK[:, order_K], renumbered_B, t_B, prior_CK / prior_CK.sum(1, keepdim=True), label_B)
    for name in ("accuracy", "cross_entropy", "entropy", "ece", "temperature", "prior_accuracy", "prior_entropy"):
        assert getattr(after, name) == pytest.approx(getattr(before, name), rel=1e-6, abs=1e-9), name
    for one, other in zip(before.by_t, after.by_t, strict=True):
        assert (one and asdict(one)) == (other and pytest.approx(asdict(other), rel=1e-9, abs=1e-9))
    confusion_KK, order = np.array(before.confusion), order_K.numpy()
    assert np.array_equal(after.confusion, confusion_KK[np.ix_(order, order)])
    for name, share_K in asdict(before.shares).items():
        assert sum(share_K) == pytest.approx(1)
        assert getattr(after.shares, name) == pytest.approx([share_K[k] for k in order]), name


def test_shares_are_counts_and_the_prior_is_a_guess_by_condition() -> None:
    """Class 0 is of cluster 0 in 3 of 4 rows, class 1 always of cluster 1; a router that always says 1 in 6 of 10."""
    prior_CK = torch.tensor([[0.75, 0.25], [0.0, 1.0], [0.5, 0.5]], dtype=torch.float64)
    cluster_B, label_B = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 0, 0, 1])
    logits_BK = torch.tensor([0.4, 0.6]).log().expand(4, -1)
    score = score_of(logits_BK, cluster_B, torch.rand(4), prior_CK, label_B)
    assert asdict(score.shares) == {
        "training": [0.5, 0.5],
        "heldout": [0.5, 0.5],
        "posterior": pytest.approx([0.4, 0.6]),
        "likeliest": [0, 1],
    }
    assert (score.accuracy, score.prior_accuracy) == (0.5, 0.75)
    own = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert score.prior_entropy == pytest.approx(own * 3 / 4)
    assert score.confusion == [[0, 2], [0, 2]]


def test_a_router_is_scored_and_the_temperature_that_it_lacks_is_found() -> None:
    """Rows are in clusters 0, 1, 1 by turns, and the router is `sharpness` times too sure of that."""

    def sure(sharpness: float):
        logits_K = torch.tensor([1 / 3, 2 / 3, 1e-30]).log() * sharpness
        return lambda x, t, label: logits_K.expand(len(x), -1)

    labels = torch.zeros(60, dtype=torch.int64)
    rows = Rows([str(n) for n in range(60)], torch.zeros(60, 1, 2, 2), labels, (torch.arange(60) % 3 > 0).long())
    info = MixtureInfo(3, (1, 2, 2), 2, torch.full((3, 3), 1 / 3))
    entropy = -(math.log(1 / 3) / 3 + math.log(2 / 3) * 2 / 3)
    for sharpness in (1.0, 2.0, 0.5):
        score = router_score(Models(info, (), sure(sharpness)), rows, seed=0)
        assert score.accuracy == pytest.approx(2 / 3)
        assert score.temperature == pytest.approx(sharpness, rel=1e-3)
        assert score.fitted_cross_entropy == pytest.approx(entropy, rel=1e-4)
        assert (score.cross_entropy > entropy + 0.01) == (sharpness != 1)


def test_trajectories_are_counted_by_their_heaviest_expert() -> None:
    """Three images over three steps: 0 stays with expert 1, 1 goes 0 - 2 - 0, 2 goes 2 - 2 - 1 with half a weight."""
    path_SB = torch.tensor([[1, 0, 2], [1, 2, 2], [1, 0, 1]])
    routing_SBK = torch.nn.functional.one_hot(path_SB, 3) * 0.5 + 0.5 / 3
    prior_BK = np.array([[0.2, 0.5, 0.3], [0.9, 0.1, 0.0], [0.3, 0.1, 0.6]])
    score = trajectory_score("top-1", routing_SBK, np.array([1, 2, 1]), prior_BK)
    assert (score.strategy, score.n, score.switches, score.steady) == ("top-1", 3, 1.0, pytest.approx(1 / 3))
    assert score.last == pytest.approx([1 / 3, 2 / 3, 0])
    assert score.aligned == pytest.approx(2 / 3)
    assert score.chance == pytest.approx((0.5 + 0.9 + 0.1) / 3)


def test_an_evaluation_has_them(random_run: Run, evaluated: Path) -> None:
    metrics = json.loads((evaluated / "metrics.json").read_text())
    router = metrics["router"]
    assert router["n"] == 16 * metrics["num_heldout"] == sum(score["n"] for score in router["by_t"])
    assert {"accuracy", "cross_entropy", "temperature", "fitted_cross_entropy"} <= router.keys()
    heldout = load_rows(random_run, [shard(cluster) for cluster in range(2)], HELDOUT)
    count_K = np.bincount(heldout.cluster_N, minlength=2)
    assert np.sum(router["confusion"], axis=1).tolist() == (16 * count_K).tolist()
    rows_K = np.array(PartitionInfo.of(random_run.require(PARTITION)).rows_K)
    assert router["shares"]["training"] == pytest.approx(rows_K / rows_K.sum())
    assert router["shares"]["heldout"] == pytest.approx(count_K / len(heldout))
    once, top_1 = router["trajectories"]
    assert (once["strategy"], top_1["strategy"]) == ("once", "top-1")
    for row in (once, top_1):
        assert row["n"] == MAX_IMAGES < metrics["num_samples"]
        assert sum(row["last"]) == pytest.approx(1)
        assert 0 <= row["aligned"] <= 1 and 0 < row["chance"] < 1
    assert (once["switches"], once["steady"]) == (0, 1)
    assert 0 <= top_1["switches"] <= metrics["sampling"]["steps"] - 1
    # The digits' clusters are halves of the plane: a neighbour is mostly of one's own.
    assert router["heldout_aligned"] > max(count_K) / len(heldout)


def test_without_a_router_there_are_none() -> None:
    info = MixtureInfo(1, (1, 2, 2), 0, torch.ones(1, 1))
    assert router_diagnostics(Models(info, (), None), None, None, ["once"], None, None) is None  # type: ignore[arg-type]


def test_the_page_says_what_the_numbers_say(evaluated: Path) -> None:
    router = json.loads((evaluated / "metrics.json").read_text())["router"]
    router["by_t"][0] |= {"accuracy": 0.9}
    router["by_t"][-1] = None
    router["by_t"][-2] |= {"accuracy": 0.4}
    page = router_page(router | {"confusion": [[80, 20], [0, 0]], "prior_accuracy": 0.3, "prior_entropy": 0.54})
    accuracy, entropy, _ = page.by_t_notes
    assert "90% with the least noise, 40% with the most. Grey: 30%" in accuracy
    assert "towards 0.54 (grey)" in entropy
    assert page.confusion_note.endswith("cluster 0, taken for 1 in 20%.")
    assert "mistake" not in router_page(router | {"confusion": [[80, 0], [0, 9]]}).confusion_note
    assert page.share_headings[-1] == "images by top-1"
    assert page.share_lines[1][1][-1] == router["trajectories"][1]["last"][1]
    assert page.by_t_png[:4] == page.confusion_png[:4] == b"\x89PNG"
