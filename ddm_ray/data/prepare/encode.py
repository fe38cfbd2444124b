"""Images -> latents, captions -> stored texts, by the run's networks. Without Ray.

Shapes: N rows, C channels, H x W pixels or latents, P channels of a pooled text.
"""

import numpy as np
import torch

from ddm_ray.config import LatentsConfig, TextConfig
from ddm_ray.core.transfer import frozen_dtype, upload
from ddm_ray.data.texts import null_text_bytes, stored_ids, stored_tokens
from ddm_ray.models.embedders import row_slices
from ddm_ray.models.latents import Latents, require_sizes
from ddm_ray.models.text import TextEncoder


class EncodeImages:
    """pixels_NHWC uint8 -> latents_NCHW float16, `batch_size` rows at a time; computed in bf16 on a GPU."""

    def __init__(self, config: LatentsConfig, channels: int, batch_size: int, device: str):
        """Load the autoencoder. Raises ConfigError, CorruptArtifact if it isn't the run's, or has other `channels`."""
        latents = Latents.from_config(config)
        require_sizes(config, latents.autoencoder.config, channels)
        self._fingerprint, self._dtype = latents.fingerprint(), frozen_dtype(device)
        self._latents = latents.to(device, self._dtype)
        self._batch_size, self._device = batch_size, device

    def fingerprint(self) -> str:
        """The autoencoder's fingerprint."""
        return self._fingerprint

    def __call__(self, pixels_NHWC: np.ndarray) -> np.ndarray:
        encoded = []
        for rows in row_slices(len(pixels_NHWC), self._batch_size):
            pixels_BHWC = upload(np.array(pixels_NHWC[rows]), self._device)
            images_BCHW = pixels_BHWC.permute(0, 3, 1, 2).float() / 127.5 - 1
            encoded.append(self._latents.encode(images_BCHW.to(self._dtype)).to(torch.float16))
        # One transfer, so that the GPU is waited for only once.
        latents_NCHW: np.ndarray = torch.cat(encoded).cpu().numpy()
        return latents_NCHW


class EncodeTexts:
    """Captions -> each row's unpadded tokens (`texts.stored_tokens`), and pooled_NP float16 if the encoder pools.

    If rows store ids (`data.text.stored`), the tokens are ids, and the pooled ones are ids for the pooled vector's
    own encoder.
    """

    def __init__(self, config: TextConfig, batch_size: int, device: str):
        """Load the text encoders. Raises ConfigError, CorruptArtifact if that fails, or they aren't the run's."""
        self._keeps_ids = config.stored == "ids"
        self._encoder = TextEncoder.from_config(config).to("cpu" if self._keeps_ids else device)
        self._batch_size = batch_size

    def fingerprint(self) -> str:
        """The text encoders' fingerprint."""
        return self._encoder.fingerprint()

    def null_text(self) -> bytes:
        """The file of the empty prompt's text (`texts.null_text_bytes`)."""
        return null_text_bytes(self._encoder.null())

    def cuts(self, captions: list[str]) -> list[tuple[str, str] | None]:
        """See TextEncoder.cuts."""
        return self._encoder.cuts(captions)

    def __call__(self, captions: list[str]) -> tuple[list[bytes], np.ndarray | list[bytes] | None]:
        if self._keeps_ids:
            ids = self._encoder.ids(captions)
            return stored_ids(ids), None if ids.pooled is None else stored_ids(ids.pooled)
        tokens: list[bytes] = []
        pooled = []
        for rows in row_slices(len(captions), self._batch_size):
            text = self._encoder.encode(captions[rows], warn=False)
            tokens += stored_tokens(text)
            if text.pooled_BP is not None:
                pooled.append(text.pooled_BP.to(torch.float16).cpu().numpy())
        return tokens, np.concatenate(pooled) if pooled else None
