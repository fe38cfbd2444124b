"""Texts to the tokens of a text model, by transformers alone. Shapes: B prompts, L tokens of E channels, P pooled."""

from collections.abc import Sequence
from typing import Any

import torch

from ddm_ray.core.condition import Text


@torch.no_grad()
def encode(tokenizer: Any, model: Any, prompts: Sequence[str], tokens: int) -> Text:
    """The prompts' Text on the model's device, padded to `tokens` with zeros; what is beyond them is cut off.

    Padding is masked, in the model too. The pooled vectors are the model's own, if it has them.
    """
    given = {"padding": "max_length", "max_length": tokens, "truncation": True, "return_tensors": "pt"}
    ids = tokenizer(list(prompts), **given)
    ids_BL, mask_BL = ids["input_ids"].to(model.device), ids["attention_mask"].to(model.device)
    encoded = model(input_ids=ids_BL, attention_mask=mask_BL)
    # Zeros beyond the mask: models that look there see the same of a text that was stored without its padding.
    encoded_BLE = encoded.last_hidden_state
    mask_BL = mask_BL.to(encoded_BLE.device, torch.bool)  # a model that is offloaded answers elsewhere
    tokens_BLE = encoded_BLE.masked_fill(~mask_BL[..., None], 0)
    return Text(tokens_BLE, mask_BL, getattr(encoded, "pooler_output", None))
