"""Encoded texts as they are stored, float16 and only the tokens that count, and how they become conditions again.

Shapes: N rows, L tokens, E and P channels of the tokens and of the pooled vector.
"""

from collections.abc import Sequence

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from ddm_ray.config import TextConfig
from ddm_ray.core.condition import Text
from ddm_ray.data.schema import TEXT
from ddm_ray.errors import CorruptArtifact

NULL_TEXT = "null_text.safetensors"
TOKENS, POOLED = "tokens_LE", "pooled_P"


def stored_tokens(text: Text) -> list[bytes]:
    """Each row's tokens that count, float16; a value too large for it becomes infinite."""
    tokens_NLE = text.tokens_BLE.to(torch.float16).cpu().numpy()
    mask_NL = text.mask_BL.cpu().numpy()
    return [tokens_LE[mask_L].astype(TEXT).tobytes() for tokens_LE, mask_L in zip(tokens_NLE, mask_NL, strict=True)]


def texts(tokens: Sequence[bytes], pooled: np.ndarray | None, config: TextConfig) -> Text:
    """Stored tokens and pooled_NP as float32 conditions, each of `config.tokens` tokens: zeros beyond those that count.

    Raises CorruptArtifact if a row's bytes aren't 1 to `config.tokens` tokens of `config.dim` channels.
    """
    width = config.dim * TEXT.itemsize
    tokens_NLE = np.zeros((len(tokens), config.tokens, config.dim), np.float32)
    lengths_N = np.zeros(len(tokens), np.int64)
    for row, stored in enumerate(tokens):
        length, rest = divmod(len(stored), width)
        if rest or not 0 < length <= config.tokens:
            raise CorruptArtifact(
                f"text of {len(stored)} bytes: not 1 to {config.tokens} tokens of {config.dim} channels (data.text);"
                " prepare and partition the run again"
            )
        tokens_NLE[row, :length] = np.frombuffer(stored, TEXT).reshape(length, config.dim)
        lengths_N[row] = length
    mask_NL = torch.arange(config.tokens) < torch.from_numpy(lengths_N)[:, None]
    pooled_NP = None if pooled is None else torch.from_numpy(pooled.astype(np.float32))
    return Text(torch.from_numpy(tokens_NLE), mask_NL, pooled_NP)


def null_text_bytes(text: Text) -> bytes:
    """A safetensors file of one row, the empty prompt's: float16 `tokens_LE`, those that count, and any `pooled_P`."""
    assert len(text) == 1
    tensors = {TOKENS: text.tokens_BLE[0][text.mask_BL[0]]}
    if text.pooled_BP is not None:
        tensors[POOLED] = text.pooled_BP[0]
    return save({name: tensor.to(torch.float16).cpu().contiguous() for name, tensor in tensors.items()})


def read_null_text(data: bytes, where: str, config: TextConfig | None = None) -> Text:
    """The one row of `null_text_bytes`, float32; with `config` padded to its tokens, as `texts` does.

    Raises CorruptArtifact naming `where` if the file isn't whole or of other sizes than `config`'s.
    """
    try:
        tensors = load(data)
    except SafetensorError as error:
        raise CorruptArtifact(f"{where}: not whole safetensors ({' '.join(str(error).split())[:120]})") from None
    tokens_LE, pooled_P = tensors.get(TOKENS), tensors.get(POOLED)
    if tokens_LE is None or tokens_LE.ndim != 2 or not len(tokens_LE) or tensors.keys() - {TOKENS, POOLED}:
        raise CorruptArtifact(f"{where}: not a text but tensors {', '.join(sorted(tensors)) or 'none'}")
    pooled_1P = None if pooled_P is None else pooled_P[None].float()
    if config is None:
        return Text(tokens_LE[None].float(), torch.ones(1, len(tokens_LE), dtype=torch.bool), pooled_1P)
    found = None if pooled_P is None else pooled_P.numel()
    if tokens_LE.shape[1] != config.dim or len(tokens_LE) > config.tokens or found != config.pooled_dim:
        raise CorruptArtifact(
            f"{where}: {len(tokens_LE)} tokens of {tokens_LE.shape[1]} channels and a pooled vector of {found},"
            f" not {config.tokens}, {config.dim} and {config.pooled_dim} (data.text)"
        )
    stored = tokens_LE.to(torch.float16).numpy().astype(TEXT).tobytes()
    return texts([stored], None if pooled_1P is None else pooled_1P.numpy(), config)
