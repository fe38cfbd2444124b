"""Encoded texts as bytes, and back."""

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from ddm_ray.config import TextConfig
from ddm_ray.core.condition import Text
from ddm_ray.data.texts import null_text_bytes, read_null_text, stored_tokens, texts
from ddm_ray.errors import CorruptArtifact

CONFIG = TextConfig(encoder="any", tokens=5, dim=3, pooled_dim=2)


def some_texts() -> Text:
    """Three texts of 5, 2 and 1 tokens, whose numbers float16 holds exactly."""
    mask_BL = torch.arange(5) < torch.tensor([5, 2, 1])[:, None]
    tokens_BLE = torch.arange(1.0, 46.0).view(3, 5, 3).masked_fill(~mask_BL[..., None], 0)
    return Text(tokens_BLE, mask_BL, torch.arange(6.0).view(3, 2) - 3)


def assert_same(one: Text, other: Text) -> None:
    assert torch.equal(one.tokens_BLE, other.tokens_BLE)
    assert torch.equal(one.mask_BL, other.mask_BL)
    assert one.pooled_BP is not None
    assert other.pooled_BP is not None
    assert torch.equal(one.pooled_BP, other.pooled_BP)


def test_tokens_that_count_are_stored_and_padded_again() -> None:
    padded = some_texts()
    stored = stored_tokens(padded)
    assert [len(row) for row in stored] == [5 * 3 * 2, 2 * 3 * 2, 3 * 2]
    assert stored[2] == np.array([31, 32, 33], "<f2").tobytes()
    assert padded.pooled_BP is not None
    again = texts(stored, padded.pooled_BP.numpy().astype(np.float16), CONFIG)
    assert again.tokens_BLE.dtype == torch.float32
    assert again.mask_BL.dtype == torch.bool
    assert_same(again, padded)
    assert texts(stored, None, CONFIG).pooled_BP is None
    assert len(texts([], None, CONFIG)) == 0


@pytest.mark.parametrize("num_bytes", [0, 5, 6 * 6])
def test_bytes_of_another_size_are_refused(num_bytes: int) -> None:
    with pytest.raises(CorruptArtifact, match=rf"^text of {num_bytes} bytes: not 1 to 5 tokens of 3 channels"):
        texts([b"\0" * 6, b"\0" * num_bytes], None, CONFIG)


def test_the_null_text_is_a_file_of_one_row() -> None:
    null = some_texts()[1:2]
    data = null_text_bytes(null)
    assert {name: tensor.dtype for name, tensor in load(data).items()} == {
        "tokens_LE": torch.float16,
        "pooled_P": torch.float16,
    }
    short = read_null_text(data, "here")
    assert_same(short, Text(null.tokens_BLE[:, :2], null.mask_BL[:, :2], null.pooled_BP))
    assert_same(read_null_text(data, "here", CONFIG), null)
    bare = CONFIG.model_copy(update={"pooled_dim": None})
    assert read_null_text(null_text_bytes(Text(null.tokens_BLE, null.mask_BL)), "here", bare).pooled_BP is None
    assert read_null_text(data, "here", bare).pooled_BP is None, "earlier versions stored one that the run hasn't"


def test_a_null_text_that_is_not_whole_or_of_another_size_is_refused() -> None:
    data = null_text_bytes(some_texts()[:1])
    for damaged, message in (
        (data[:-1], "not whole safetensors"),
        (b"", "not whole safetensors"),
        (save({"pooled_P": torch.zeros(2)}), "not a text but tensors pooled_P"),
        (save({}), "not a text but tensors none"),
    ):
        with pytest.raises(CorruptArtifact, match=f"^here: {message}"):
            read_null_text(damaged, "here")
    for changes in ({"tokens": 4}, {"dim": 2}, {"pooled_dim": 3}):
        with pytest.raises(CorruptArtifact, match=r"^here: 5 tokens of 3 channels and a pooled vector of 2, not "):
            read_null_text(data, "here", CONFIG.model_copy(update=changes))
