"""Conditions: texts behave as a tensor of rows does, and a mixture conditioned on texts is sampled right."""

import pytest
import torch

from ddm_ray.config import SamplingSettings
from ddm_ray.core.condition import Text, join
from ddm_ray.sampling import driver
from ddm_ray.sampling.request import SampleRequest
from tests.core import closed_forms, strategy_oracles


def text(num_rows: int, pooled: bool = True) -> Text:
    tokens_BLE = torch.arange(num_rows * 6.0).view(num_rows, 3, 2)
    mask_BL = torch.arange(3) <= torch.arange(num_rows)[:, None] % 3
    return Text(tokens_BLE, mask_BL, torch.arange(num_rows * 4.0).view(num_rows, 4) if pooled else None)


@pytest.mark.parametrize("rows", [slice(1, 4), torch.tensor([4, 0, 0]), torch.tensor([True, False, True, False, True])])
@pytest.mark.parametrize("pooled", [True, False])
def test_rows_of_texts_are_the_rows_of_each_part(rows, pooled: bool) -> None:
    texts, chosen = text(5, pooled), text(5, pooled)[rows]
    assert len(texts) == 5
    assert torch.equal(chosen.tokens_BLE, texts.tokens_BLE[rows])
    assert torch.equal(chosen.mask_BL, texts.mask_BL[rows])
    if pooled:
        assert chosen.pooled_BP is not None
        assert torch.equal(chosen.pooled_BP, texts.pooled_BP[rows])
    else:
        assert chosen.pooled_BP is None


@pytest.mark.parametrize("pooled", [True, False])
def test_parts_join_to_the_whole(pooled: bool) -> None:
    texts = text(5, pooled)
    again = join([texts[:2], texts[2:3], texts[3:]])
    assert torch.equal(again.tokens_BLE, texts.tokens_BLE)
    assert torch.equal(again.mask_BL, texts.mask_BL)
    assert (again.pooled_BP is None) is not pooled
    if pooled:
        assert torch.equal(again.pooled_BP, texts.pooled_BP)
    assert again.to("meta").tokens_BLE.is_meta
    assert again.to("meta").mask_BL.is_meta
    strategy_oracles.check_conditions_are_apart()


@pytest.mark.parametrize("strategy", ["once", "full"])
@pytest.mark.parametrize("condition", [0, 1])
def test_images_of_a_text_are_those_of_its_condition(strategy: str, condition: int) -> None:
    strategy_oracles.check_texts(strategy, condition)


def test_a_guided_texts_field_is_exact() -> None:
    strategy_oracles.check_text_guidance()


def test_a_text_asks_the_router_once_for_once_and_its_k_depends_on_nothing_else() -> None:
    texts = closed_forms.Texts(closed_forms.three_gaussians())
    request = SampleRequest(
        tuple(range(20)), texts.texts(torch.zeros(20, dtype=torch.int64)), SamplingSettings(steps=3)
    )
    sampled = driver.sample(request, texts.info(), texts.experts, texts.router)
    assert (sampled.num_expert_rows, sampled.num_router_rows) == (60, 20)
    expert_B, num_router_rows = driver.drawn_experts(request, texts.info(), texts.router)
    assert num_router_rows == 20
    assert torch.equal(sampled.experts_SB, expert_B.expand(3, 20))
    alone = driver.sample(request.rows(slice(7, 9)), texts.info(), texts.experts, texts.router)
    torch.testing.assert_close(alone.images_BCHW, sampled.images_BCHW[7:9], rtol=0, atol=1e-12)
