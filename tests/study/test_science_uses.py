"""What a study asks of networks that it has: which images are pairs, and how alike they are."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch


@pytest.fixture
def uses(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("science_uses")


def test_another_image_is_of_the_same_class_and_each_is_anothers_once(uses: ModuleType) -> None:
    label_M = torch.tensor([2, 0, 2, 1, 0, 2])
    other_M = uses.another_of_its_class(label_M)
    assert other_M.tolist() == [2, 4, 5, 3, 1, 0], "the one image of class 1 has no other"


def test_the_nearest_row_is_of_training_by_chance_or_by_copying(uses: ModuleType) -> None:
    random = np.random.default_rng(0)
    rows_TD, fresh_MD = random.normal(size=(1000, 6)), 0.4 * random.normal(size=(1200, 6))
    drawn = []
    for _ in range(200):
        rows_TD = random.permutation(rows_TD)
        drawn.append(uses.Nearest.of(fresh_MD, rows_TD[:900], rows_TD[900:]))
    shares = [nearest.in_training for nearest in drawn]
    assert np.mean(shares) == pytest.approx(0.9, abs=4 * drawn[0].deviation / 200**0.5) and drawn[0].by_chance == 0.9
    assert np.std(shares) == pytest.approx(drawn[0].deviation, rel=0.15)
    assert drawn[0].deviation > 1.3 * (0.9 * 0.1 / len(fresh_MD)) ** 0.5, "some rows are near to many"
    train_ND, heldout_HD = rows_TD[:900], rows_TD[900:]
    copied = train_ND + 1e-3 * random.normal(size=train_ND.shape)
    assert uses.Nearest.of(copied, train_ND, heldout_HD).in_training == 1
    assert uses.Nearest.of(heldout_HD, train_ND, heldout_HD).in_training == 0


def test_a_forecast_is_measured_again_if_a_partition_changes_and_pairs_if_their_monolith_does(
    script: Callable[[str], ModuleType],
) -> None:
    shapes = script("science_plan").Plan.read("shapes")

    def with_arm(name: str, **fields: Any) -> Any:
        return shapes.model_copy(update={"arms": shapes.arms | {name: shapes.arms[name].model_copy(update=fields)}})

    other_clusters = with_arm("k4", settings=("partition.num_clusters=5",))
    other_monolith = with_arm("fast", settings=("expert.train.learning_rate=8.0e-3",))
    longer = with_arm("long", settings=("expert.train.steps=3200",))
    for arm, changed_by in (("forecast", other_clusters), ("pairs", other_monolith), ("long-copies", longer)):
        for plan in (other_clusters, other_monolith, longer):
            assert (plan.digest(arm) != shapes.digest(arm)) == (plan is changed_by), arm
