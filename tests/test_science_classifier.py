"""Small classifiers as a study's ruler: what they tell apart, and whose shares they count."""

from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
import torch

from ddm_ray.data.loading.loader import Rows


@pytest.fixture
def ruler(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("science_classifier")


@pytest.fixture
def rows() -> Rows:
    """Noise about three greys: one class each."""
    label_N = torch.arange(600) % 3
    noise_NCHW = 0.3 * torch.randn(600, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    data_NCHW = noise_NCHW + (label_N.float() - 1).view(-1, 1, 1, 1)
    return Rows([f"{row:03d}" for row in range(600)], data_NCHW, label_N, torch.zeros(600, dtype=torch.int64))


def test_a_classifier_counts_the_shares_of_classes(ruler: ModuleType, rows: Rows) -> None:
    own = ruler.ClassifierRuler.of(rows, 0)
    assert own.share_L == pytest.approx(np.full(3, 1 / 3), abs=0.02), "it tells them apart"
    same = own.score(rows.data_NCHW)
    assert same["frechet"] == pytest.approx(0, abs=1e-3) and same["tv"] == pytest.approx(0, abs=1e-6)
    one_lacks = own.score(rows.data_NCHW[rows.label_N != 1])
    assert one_lacks["tv"] == pytest.approx(1 / 3, abs=0.02)
    assert one_lacks["frechet"] > 100 * own.score(rows.data_NCHW[::2])["frechet"]


def test_classifiers_differ_by_their_seeds_alone(ruler: ModuleType, rows: Rows) -> None:
    before = torch.get_rng_state()
    rulers = [ruler.ClassifierRuler.of(rows, seed) for seed in (0, 0, 1)]
    assert torch.equal(before, torch.get_rng_state()), "others' random numbers are left as they were"
    scores = ruler.scores(rulers, rows.data_NCHW[:300] + 0.2)
    assert scores.keys() == {"frechet", "tv"}
    first, again, other = scores["frechet"]
    assert first == again != other
