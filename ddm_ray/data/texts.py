"""Texts as they are stored, encoded (float16) or as ids, without padding; and how they are read back.

Shapes: N rows, L tokens, E and P channels of the tokens and of the pooled vector.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from ddm_ray.config import TextConfig
from ddm_ray.core.condition import Text, TextIds
from ddm_ray.data.schema import IDS, TEXT
from ddm_ray.errors import CorruptArtifact
from ddm_ray.models import null_text

MAX_POOLED = 512
"""Maximum tokens that the encoder of a pooled vector reads: CLIP's reads 77."""


def stored_tokens(text: Text) -> list[bytes]:
    """Each row's unpadded tokens, float16. A value that is too large becomes infinite."""
    tokens_NLE = text.tokens_BLE.to(torch.float16).cpu().numpy()
    mask_NL = text.mask_BL.cpu().numpy()
    return [tokens_LE[mask_L].astype(TEXT).tobytes() for tokens_LE, mask_L in zip(tokens_NLE, mask_NL, strict=True)]


def stored_ids(ids: TextIds) -> list[bytes]:
    """Each row's unpadded ids."""
    rows = zip(ids.ids_BL.numpy(), ids.mask_BL.numpy(), strict=True)
    return [ids_L[mask_L].astype(IDS).tobytes() for ids_L, mask_L in rows]


def read_ids(tokens: Sequence[bytes], pooled: Sequence[bytes] | None, config: TextConfig) -> TextIds:
    """Stored ids of the encoder, and of the pooled vector's encoder if it is another; padded with masked zeros.

    Raises CorruptArtifact if a row's bytes aren't 1 to `config.tokens` ids.
    """
    longest = max(map(len, pooled or ()), default=0) // IDS.itemsize
    own = None if pooled is None else _padded(pooled, max(1, min(longest, MAX_POOLED)))
    return replace(_padded(tokens, config.tokens), pooled=own)


def _padded(tokens: Sequence[bytes], most: int) -> TextIds:
    ids_NL, lengths_N = np.zeros((len(tokens), most), np.int64), np.zeros(len(tokens), np.int64)
    for row, stored in enumerate(tokens):
        length, rest = divmod(len(stored), IDS.itemsize)
        if rest or not 0 < length <= most:
            raise CorruptArtifact(
                f"text of {len(stored)} bytes: not the ids of 1 to {most} tokens (data.text); prepare and partition the"
                " run again"
            )
        ids_NL[row, :length], lengths_N[row] = np.frombuffer(stored, IDS), length
    return TextIds(torch.from_numpy(ids_NL), torch.arange(most) < torch.from_numpy(lengths_N)[:, None])


def texts(tokens: Sequence[bytes], pooled: np.ndarray | None, config: TextConfig) -> Text:
    """Stored tokens and pooled_NP as float32 conditions, zero-padded to `config.tokens` tokens.

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


def no_texts(config: TextConfig) -> Text:
    """The texts of zero rows."""
    return texts([], None if config.pooled_dim is None else np.empty((0, config.pooled_dim), TEXT), config)


def null_text_bytes(text: Text) -> bytes:
    """The file of the empty prompt's text (models.null_text), in the form of stored rows: float16, unpadded."""
    tokens_1LE = text.tokens_BLE[:, text.mask_BL[0]].to(torch.float16)
    pooled_1P = None if text.pooled_BP is None else text.pooled_BP.to(torch.float16)
    return null_text.pack_null_text(Text(tokens_1LE, torch.ones(tokens_1LE.shape[:2], dtype=torch.bool), pooled_1P))


def read_null_text(data: bytes, where: str, config: TextConfig | None = None) -> Text:
    """Read the output of `null_text_bytes` as float32. With `config`, pad it to its tokens, as `texts` does.

    Raises CorruptArtifact naming `where` if the file isn't complete, or has other sizes than `config`.
    """
    text = null_text.unpack_null_text(data, where)
    pooled_1P = None if text.pooled_BP is None else text.pooled_BP.float()
    if config is None:
        return Text(text.tokens_BLE.float(), text.mask_BL, pooled_1P)
    if config.pooled_dim is None:
        pooled_1P = None  # earlier versions stored CLIP's vector even if the run has none
    _, num_tokens, width = text.tokens_BLE.shape
    pooled_dim = None if pooled_1P is None else pooled_1P.shape[1]
    if width != config.dim or num_tokens > config.tokens or pooled_dim != config.pooled_dim:
        raise CorruptArtifact(
            f"{where}: {num_tokens} tokens of {width} channels and a pooled vector of {pooled_dim},"
            f" not {config.tokens}, {config.dim} and {config.pooled_dim} (data.text)"
        )
    return texts(stored_tokens(text), None if pooled_1P is None else pooled_1P.numpy(), config)
