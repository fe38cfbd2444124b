"""The empty prompt's text as a file: one format, whole or refused, and the names that exports had before."""

import pytest
import torch
from safetensors.torch import load, save

from ddm_ray.core.condition import Text
from ddm_ray.errors import CorruptArtifact
from ddm_ray.models import null_text

TOKENS_1LE, POOLED_1P = torch.arange(12.0).view(1, 4, 3) / 7, torch.arange(2.0).view(1, 2)
SOME, ALL = torch.tensor([[True, True, False, True]]), torch.ones(1, 4, dtype=torch.bool)


@pytest.mark.parametrize("mask_1L", [SOME, ALL])
@pytest.mark.parametrize("pooled_1P", [POOLED_1P, None])
def test_a_text_survives_to_the_bit(mask_1L: torch.Tensor, pooled_1P: torch.Tensor | None) -> None:
    data = null_text.pack_null_text(Text(TOKENS_1LE, mask_1L, pooled_1P))
    names = {"tokens_LE"} | ({"mask_L"} if mask_1L is SOME else set())
    names |= set() if pooled_1P is None else {"pooled_P"}
    assert load(data).keys() == names
    before = {"tokens_BLE": TOKENS_1LE, "mask_BL": mask_1L} | ({} if pooled_1P is None else {"pooled_BP": pooled_1P})
    for written in (data, save(before)):
        text = null_text.unpack_null_text(written, "here")
        assert torch.equal(text.tokens_BLE, TOKENS_1LE) and torch.equal(text.mask_BL, mask_1L)
        assert text.pooled_BP is None if pooled_1P is None else torch.equal(text.pooled_BP, pooled_1P)


@pytest.mark.parametrize(
    "tensors",
    [
        {"tokens_LE": torch.zeros(0, 3)},
        {"tokens_LE": torch.zeros(3)},
        {"tokens_LE": torch.zeros(2, 3), "mask_L": torch.zeros(2, dtype=torch.bool)},
        {"tokens_LE": torch.zeros(2, 3), "mask_L": torch.ones(3, dtype=torch.bool)},
        {"tokens_LE": torch.zeros(2, 3), "pooled_P": torch.zeros(())},
        {"tokens_LE": torch.zeros(2, 3), "x": torch.zeros(1)},
    ],
)
def test_what_is_no_text_is_refused(tensors: dict[str, torch.Tensor]) -> None:
    with pytest.raises(CorruptArtifact, match=r"^here: not a text"):
        null_text.unpack_null_text(save(tensors), "here")
