"""What a study asks of networks that it has: which images are pairs, and how alike they are."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch


@pytest.fixture
def uses(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("science_uses")


def test_another_image_is_of_the_same_class_and_each_is_anothers_once(uses: ModuleType) -> None:
    label_M = torch.tensor([2, 0, 2, 1, 0, 2])
    other_M = uses.another_of_its_class(label_M)
    assert other_M.tolist() == [2, 4, 5, 3, 1, 0], "the one image of class 1 has no other"


def test_classes_have_means_of_their_own(uses: ModuleType) -> None:
    data_NCHW = torch.tensor([1.0, 5.0, 3.0]).view(3, 1, 1, 1)
    means = uses.class_means(data_NCHW, torch.tensor([2, 0, 2]))
    assert means[[0, 2]].flatten().tolist() == [5.0, 2.0] and means[1].isnan().all()


def test_images_are_alike_by_the_cosine_of_all_their_pixels(uses: ModuleType) -> None:
    random = torch.Generator().manual_seed(0)
    a_MCHW, b_MCHW = torch.randn(2, 4000, 3, 2, 2, generator=random).unbind()
    assert uses.cosine(a_MCHW, 3 * a_MCHW) == pytest.approx(1)
    assert uses.cosine(a_MCHW, -a_MCHW) == pytest.approx(-1)
    assert uses.cosine(a_MCHW, b_MCHW) == pytest.approx(0, abs=0.02)
    assert uses.cosine(a_MCHW, a_MCHW + b_MCHW) == pytest.approx(0.5**0.5, abs=0.02)


def test_the_nearest_row_is_a_training_row_by_chance_or_by_copying(uses: ModuleType) -> None:
    random = np.random.default_rng(0)
    train_ND, heldout_HD, fresh_MD = (random.normal(size=(count, 6)) for count in (900, 100, 1200))
    assert uses.nearest_in_training(fresh_MD, train_ND, heldout_HD) == pytest.approx(0.9, abs=0.03)
    copied = train_ND + 1e-3 * random.normal(size=train_ND.shape)
    assert uses.nearest_in_training(copied, train_ND, heldout_HD) == 1
    assert uses.nearest_in_training(heldout_HD, train_ND, heldout_HD) == 0
    assert uses.nearest_in_training(train_ND[:3], train_ND, train_ND) == 0.5


def test_a_forecast_is_measured_again_if_a_partition_changes_and_pairs_if_their_monolith_does(
    benchmark: Callable[[str], ModuleType],
) -> None:
    shapes = benchmark("science_plan").Plan.read("shapes")

    def with_arm(name: str, **fields: Any) -> Any:
        return shapes.model_copy(update={"arms": shapes.arms | {name: shapes.arms[name].model_copy(update=fields)}})

    other_clusters = with_arm("k4", settings=("partition.num_clusters=5",))
    other_monolith = with_arm("fast", settings=("expert.train.learning_rate=8.0e-3",))
    longer = with_arm("long", settings=("expert.train.steps=3200",))
    for arm, changed_by in (("forecast", other_clusters), ("pairs", other_monolith), ("long-copies", longer)):
        for plan in (other_clusters, other_monolith, longer):
            assert (plan.digest(arm) != shapes.digest(arm)) == (plan is changed_by), arm
