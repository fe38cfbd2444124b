"""What a study asks of networks that it has: which images are pairs, and how alike they are."""

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
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


def test_a_nucleus_short_of_its_bound_keeps_none_where_one_has_all_and_one_drawn_from_it_keeps_its_weight(
    script: Callable[[str], ModuleType],
) -> None:
    faults, random = script("science_faults").FAULTS, torch.Generator().manual_seed(0)
    probs_BK = torch.tensor([[0.95, 0.03, 0.02], [0.2, 0.5, 0.3], [0.05, 0.1, 0.85]])
    short_BK = faults["nucleus-0.9, bound left out"](probs_BK, random)
    torch.testing.assert_close(short_BK, torch.tensor([[0.0, 0, 0], [0, 0.625, 0.375], [0, 0, 1]]))
    drawn_BK = faults["nucleus-0.9, one drawn"](probs_BK.repeat(4000, 1), random).view(4000, 3, 3)
    assert torch.equal(drawn_BK.amax(0), torch.tensor([[0.95, 0, 0], [0.2, 0.5, 0.3], [0, 0.1, 0.85]]))
    assert ((drawn_BK > 0).sum(2) == 1).all()
    shares_BK = (drawn_BK > 0).double().mean(0)
    expected_BK = torch.tensor([[1.0, 0, 0], [0.2, 0.5, 0.3], [0, 0.1 / 0.95, 0.85 / 0.95]], dtype=torch.float64)
    torch.testing.assert_close(shares_BK, expected_BK, atol=0.04, rtol=0)


def test_where_a_fault_leaves_no_expert_there_is_no_velocity(script: Callable[[str], ModuleType]) -> None:
    class Router(torch.nn.Module):
        def forward(self, x_BCHW: torch.Tensor, t_B: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
            return torch.stack([t_B, 1 - t_B], dim=1).log()

    def velocity_of(expert: float) -> Callable[..., torch.Tensor]:
        return lambda x_BCHW, t_B, condition: torch.full_like(x_BCHW, expert)

    faults = script("science_faults")
    mixture = SimpleNamespace(router=Router(), experts=[velocity_of(3), velocity_of(5)])
    field = faults.Faulty(mixture, faults.FAULTS["nucleus-0.9, bound left out"], torch.Generator())
    x_BCHW, t_B = torch.ones(3, 1, 2, 2), torch.tensor([0.95, 0.8, 0.2])
    assert field(x_BCHW, t_B, t_B).amax((1, 2, 3)).tolist() == [0, 3, 5]
    assert not field(x_BCHW[:1], t_B[:1], t_B[:1]).any()


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
