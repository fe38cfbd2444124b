"""What a sampler is asked for and knows: shapes that must fit, and one line for each thing that can't be met."""

from dataclasses import replace

import pytest
import torch

from ddm_ray.config import SamplingSettings
from ddm_ray.core.condition import Text
from ddm_ray.core.routing import Once, TopK
from ddm_ray.errors import ExpertCountError, SamplingError
from ddm_ray.sampling.request import MixtureInfo, SampleRequest, validate
from tests.core import closed_forms

INFO = MixtureInfo.from_counts(
    torch.tensor([[8, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [9, 5, 1, 1]]), image_shape=(1, 4, 4)
)
TEXTS = closed_forms.Texts(closed_forms.three_gaussians())
ORACLE = SamplingSettings(strategy="oracle")
WANTED = SampleRequest((0, 1, 2, 3), torch.tensor([0, 1, 2, 3]))


def test_priors_from_counts() -> None:
    right = [[1, 0, 0, 0], [0.25] * 4, [9 / 16, 5 / 16, 1 / 16, 1 / 16], [9 / 16, 5 / 16, 1 / 16, 1 / 16]]
    torch.testing.assert_close(INFO.prior_CK, torch.tensor(right, dtype=torch.float64))
    assert (INFO.num_experts, INFO.num_classes) == (4, 3)
    for counts in (torch.zeros(3, 4), torch.ones(4)):
        with pytest.raises(SamplingError, match="totals"):
            MixtureInfo.from_counts(counts, (1, 4, 4))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"available_K": torch.ones(3, dtype=torch.bool)}, r"available_K has shape \(3,\), expected \(4,\)"),
        ({"prior_CK": torch.ones(4, 3)}, r"prior_CK has shape \(4, 3\), expected \(4, 4\)"),
        ({"prior_CK": torch.ones(3, 4)}, r"prior_CK has shape \(3, 4\), expected \(4, 4\)"),
        ({"num_experts": 5}, r"prior_CK has shape \(4, 4\), expected \(4, 5\)"),
        ({"num_classes": None}, r"prior_CK has shape \(4, 4\), expected \(1, 4\)"),
    ],
)
def test_numbers_of_experts_that_disagree_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(ExpertCountError, match=message):
        replace(INFO, **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"seeds": (1, 2)}, "2 seeds with 4 conditions"),
        ({"seeds": (), "condition": torch.zeros(0, dtype=torch.int64)}, "0 seeds"),
        ({"condition": torch.tensor(1)}, "4 seeds with 1 conditions"),
        ({"seeds": (1,), "condition": torch.tensor(1)}, r"labels must be int64 of shape \(1,\)"),
        ({"condition": torch.zeros(4, 1, dtype=torch.int64)}, r"int64 of shape \(4,\)"),
        ({"condition": torch.tensor([0, 1, 2, 4])}, "labels must be from 0 to 3"),
        ({"condition": torch.tensor([0, 1, 2, -1])}, "labels must be from 0 to 3"),
        ({"condition": torch.zeros(4)}, "labels must be int64"),
        ({"condition": TEXTS.texts(torch.zeros(4, dtype=torch.int64))}, "conditioned on class labels"),
        ({"seeds": (0, 1, 2, -1)}, "seeds must be"),
        ({"seeds": (0, 1, 2, 2**64)}, "seeds must be"),
        ({"settings": SamplingSettings(strategy="top-5")}, "unknown strategy 'top-5' for 4 experts"),
        ({"settings": ORACLE}, "strategy oracle needs a cluster from 0 to 3 for each image"),
        ({"settings": ORACLE, "cluster_B": torch.tensor([0, 1, 2])}, "oracle needs a cluster"),
        ({"settings": ORACLE, "cluster_B": torch.tensor([0, 1, 2, 4])}, "oracle needs a cluster"),
        ({"settings": ORACLE, "cluster_B": torch.tensor([0, 1, -1, 2])}, "oracle needs a cluster"),
        ({"settings": ORACLE, "cluster_B": torch.zeros(4)}, "oracle needs a cluster"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused_in_one_line(fields: dict, message: str) -> None:
    with pytest.raises(SamplingError, match=message) as error:
        validate(replace(WANTED, **fields), INFO)
    assert "\n" not in str(error.value)


def test_what_can_be_met_gives_the_strategy() -> None:
    assert validate(WANTED, INFO) == Once()
    edges = SamplingSettings(guidance_scale=0.0, guidance_interval=(0.5, 0.5), strategy="top-2", steps=1)
    assert validate(replace(WANTED, seeds=(0, 1, 2, 2**64 - 1), settings=edges), INFO) == TopK(2)


def test_texts_are_asked_of_models_of_texts_alone() -> None:
    info, condition = TEXTS.info(), TEXTS.texts(torch.tensor([0, 1]))
    assert validate(SampleRequest((1, 2), condition, SamplingSettings(guidance_scale=3.0)), info) == Once()
    with pytest.raises(SamplingError, match="conditioned on texts"):
        validate(SampleRequest((1, 2), torch.tensor([0, 1])), info)
    with pytest.raises(SamplingError, match="1 seeds with 2 conditions"):
        validate(SampleRequest((1,), condition), info)
    empty = Text(condition.tokens_BLE, torch.zeros_like(condition.mask_BL))
    with pytest.raises(SamplingError, match="a text without a token"):
        validate(SampleRequest((1, 2), empty), info)


def test_without_a_null_condition_neither_guidance_nor_unconditional_images() -> None:
    without = replace(INFO, trained_null=False)
    labels = torch.tensor([0, 1, 2, 0])
    assert validate(replace(WANTED, condition=labels), without) == Once()
    labelled = replace(WANTED, condition=labels)
    for request in (labelled.changed(guidance_scale=2.0), labelled.changed(guidance_scale=0.0), WANTED):
        with pytest.raises(SamplingError, match="trained without a null condition: use guidance_scale 1") as error:
            validate(request, without)
        assert "\n" not in str(error.value)
    texts = SampleRequest((1,), TEXTS.texts(torch.tensor([0])), SamplingSettings(guidance_scale=2.0))
    for info in (TEXTS.info(null=False), replace(TEXTS.info(), trained_null=False)):
        with pytest.raises(SamplingError, match="null condition"):
            validate(texts, info)


def test_models_without_classes_are_asked_for_the_null_condition_alone() -> None:
    counts = MixtureInfo.from_counts(torch.tensor([[3, 1]]), (1, 4, 4))
    sample_request = SampleRequest((1,), torch.zeros(1, dtype=torch.int64))
    for info in (counts, replace(counts, trained_null=False)):
        for scale in (0.0, 1.0):
            assert validate(sample_request.changed(guidance_scale=scale), info) == Once()
        with pytest.raises(SamplingError, match="no classes to guide to"):
            validate(sample_request.changed(guidance_scale=2.0), info)


def test_the_null_condition_is_a_row_for_each_image() -> None:
    assert INFO.null(3).tolist() == [3, 3, 3]
    null = TEXTS.info().null(3)
    assert isinstance(null, Text)
    assert len(null) == 3
    assert torch.equal(null.tokens_BLE[1:], null.tokens_BLE[:1].expand(2, -1, -1))


@pytest.mark.parametrize(
    "rows", [slice(1, 3), slice(2, 4), torch.tensor([3, 0]), torch.tensor([False, True, True, False])]
)
def test_rows_of_a_request_keep_seed_condition_and_cluster_together(rows) -> None:
    full_request = replace(WANTED, seeds=(9, 8, 7, 6), cluster_B=torch.tensor([3, 2, 1, 0])).changed(steps=7)
    part = full_request.rows(rows)
    index = torch.arange(4)[rows].tolist()
    assert part.seeds == tuple(full_request.seeds[i] for i in index)
    assert part.condition.tolist() == index
    assert part.cluster_B.tolist() == [3 - i for i in index]
    assert part.settings.steps == 7
    texts = replace(full_request, condition=TEXTS.texts(torch.tensor([0, 1, 0, 1])), cluster_B=None).rows(rows)
    assert torch.equal(texts.condition.tokens_BLE, TEXTS.texts(torch.tensor([0, 1, 0, 1])).tokens_BLE[index])
