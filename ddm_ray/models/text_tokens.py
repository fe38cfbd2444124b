"""Texts to the tokens of a text model, by transformers alone. Shapes: B prompts, L tokens of E channels, P pooled."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ddm_ray.core.condition import Text, TextIds

ADD = ("eager", "sdpa")
"""Implementations of attention that add what they are given for a mask; others take which tokens count."""


def tokenize(tokenizer: Any, prompts: Sequence[str], tokens: int) -> TextIds:
    """The prompts' ids, padded to `tokens`; what is beyond them is cut off."""
    given = {"padding": "max_length", "max_length": tokens, "truncation": True, "return_tensors": "pt"}
    ids = tokenizer(list(prompts), padding_side="right", **given)
    return TextIds(ids["input_ids"], ids["attention_mask"].bool())


def encode(tokenizer: Any, model: Any, prompts: Sequence[str], tokens: int) -> Text:
    """The prompts' Text on the model's device, padded to `tokens` with zeros; what is beyond them is cut off.

    Padding is masked, in the model too. The pooled vectors are the model's own, if it has them.
    """
    return encode_ids(model, tokenize(tokenizer, prompts, tokens).to(model.device))


@torch.no_grad()
def encode_ids(model: Any, ids: TextIds) -> Text:
    """The Text of ids on the model's device. Padding is masked, in the model too."""
    attends = getattr(model.config, "_attn_implementation", None) in ADD
    mask = _bias_B1LL(model, ids.mask_BL) if attends else ids.mask_BL.long()
    encoded = model(input_ids=ids.ids_BL, attention_mask=mask)
    # Zeros beyond the mask: models that look there see the same of a text that was stored without its padding.
    encoded_BLE = encoded.last_hidden_state
    mask_BL = ids.mask_BL.to(encoded_BLE.device)  # a model that is offloaded answers elsewhere
    tokens_BLE = encoded_BLE.masked_fill(~mask_BL[..., None], 0)
    return Text(tokens_BLE, mask_BL, getattr(encoded, "pooler_output", None))


def _bias_B1LL(model: Any, mask_BL: Tensor) -> Tensor:
    """Numbers that attention adds: 0 to tokens that count, and in CLIP come no later, the least number to others.

    Of a mask_BL transformers would make the same, but asks first if all count, which a GPU is waited for.
    """
    most = mask_BL.shape[1]
    seen_B1LL = mask_BL[:, None, None].expand(-1, -1, most, -1)
    if model.config.model_type.startswith("clip"):
        seen_B1LL = seen_B1LL & torch.ones(most, most, dtype=torch.bool, device=mask_BL.device).tril()
    bias_B1LL = torch.zeros(seen_B1LL.shape, dtype=model.dtype, device=mask_BL.device)
    return bias_B1LL.masked_fill(~seen_B1LL, torch.finfo(model.dtype).min)
