"""Text encoder and autoencoder of a run, as parts of the ingress or as deployments of their own.

Calls of several requests at the same time are one batch.
"""

import asyncio

import numpy as np
import torch
from numpy.typing import NDArray
from ray import serve

from ddm_ray.config.data import LatentsConfig, TextConfig
from ddm_ray.core.condition import Text
from ddm_ray.models.latents import Latents
from ddm_ray.models.text import TextEncoder

MAX_TEXTS, MAX_DECODED = 16, 8
"""Bounds of a batch; an autoencoder takes far more memory than its latents."""
WAIT_S = 0.005

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray | None]


class Encoder:
    """The text encoder of a run."""

    def __init__(self, config: TextConfig, device: str, known: str | None = None):
        """Loads it by its name or folder; `known`: its fingerprint. Raises as `TextEncoder.from_config`."""
        torch.set_num_threads(1)
        self._encoder = TextEncoder.from_config(config, known).to(device)

    async def encode(self, prompt: str) -> tuple[Arrays, int]:
        """The Text of a prompt, one row, as arrays, and the prompt's number of tokens, also of those cut off."""
        return await self._batch(prompt)

    @serve.batch(max_batch_size=MAX_TEXTS, batch_wait_timeout_s=WAIT_S)
    async def _batch(self, prompts: list[str]) -> list[tuple[Arrays, int]]:
        text, lengths = await asyncio.to_thread(self._encode, prompts)
        return [(to_arrays(text[row : row + 1]), length) for row, length in enumerate(lengths)]

    def _encode(self, prompts: list[str]) -> tuple[Text, list[int]]:
        return self._encoder.encode(prompts, warn=False).to("cpu"), self._encoder.lengths(prompts)


class Decoder:
    """The autoencoder of a run, which makes images of latents."""

    def __init__(self, config: LatentsConfig, device: str, known: str | None = None):
        """Loads it by its name or folder; `known`: its fingerprint. Raises as `Latents.from_config`."""
        torch.set_num_threads(1)
        self._latents, self._device = Latents.from_config(config, known).to(device), device

    async def decode(self, latent_CHW: NDArray[np.float32]) -> NDArray[np.float32]:
        """The image (C, H, W), about [-1, 1], of one latent."""
        return await self._batch(latent_CHW)

    @serve.batch(max_batch_size=MAX_DECODED, batch_wait_timeout_s=WAIT_S)
    async def _batch(self, latents: list[NDArray[np.float32]]) -> list[NDArray[np.float32]]:
        return list(await asyncio.to_thread(self._decode, np.stack(latents)))

    def _decode(self, latents_BCHW: NDArray[np.float32]) -> NDArray[np.float32]:
        return self._latents.decode(torch.from_numpy(latents_BCHW).to(self._device)).cpu().numpy()


def to_arrays(text: Text) -> Arrays:
    """A text as arrays, which Ray passes to another process without a copy."""
    pooled = text.pooled_BP
    return text.tokens_BLE.numpy(), text.mask_BL.numpy(), None if pooled is None else pooled.numpy()


def from_arrays(arrays: Arrays) -> Text:
    """The text of the arrays of `to_arrays`. They are copied: they may be read-only views of shared memory."""
    tokens_BLE, mask_BL, pooled_BP = arrays
    return Text(torch.tensor(tokens_BLE), torch.tensor(mask_BL), None if pooled_BP is None else torch.tensor(pooled_BP))
