"""Latents: what an autoencoder makes of images, scaled for a diffusion model. Shapes: B rows, C channels, H x W."""

from collections.abc import Mapping, Sized
from typing import Any, Self

import torch
from torch import Tensor

from ddm_ray.config import LatentsConfig
from ddm_ray.errors import ConfigError
from ddm_ray.models import third_party
from ddm_ray.models.fingerprints import fingerprint_of, require_same_network
from ddm_ray.models.hub import network_folder
from ddm_ray.remedies import Begin


class Latents:
    """An AutoencoderKL of diffusers with `scale` and `shift`: latent = (encoded - shift) * scale."""

    def __init__(self, autoencoder: Any, scale: float, shift: float = 0.0) -> None:
        self.autoencoder, self.scale, self.shift = autoencoder.eval(), scale, shift

    @classmethod
    def from_pretrained(cls, name: str, scale: float | None = None, shift: float | None = None) -> Self:
        """From a folder, or a name of the hub; scale and shift are the autoencoder's own unless given.

        ConfigError if there is none, and without diffusers; CorruptArtifact if it isn't whole.
        """
        try:
            from diffusers import AutoencoderKL
        except ImportError:
            raise ConfigError("latents need diffusers: install it with: pip install 'ddm-ray[diffusers]'") from None
        autoencoder = third_party.load_pretrained_model(AutoencoderKL, name, "autoencoder")
        own = autoencoder.config
        scale = own.scaling_factor if scale is None else scale
        return cls(autoencoder, scale, (own.shift_factor or 0.0) if shift is None else shift)

    @classmethod
    def from_config(cls, config: LatentsConfig, known: str | None = None) -> Self:
        """The autoencoder of a run; its fingerprint is `known` if it has made rows already.

        ConfigError as `from_pretrained`, and for another downsampling than the run's; DriftError for another network.
        """
        latents = cls.from_pretrained(config.autoencoder, config.scale, config.shift)
        require_sizes(config, latents.autoencoder.config)
        if known is not None:
            require_same_network(f"autoencoder {config.autoencoder}", latents.fingerprint(), known)
        return latents

    @property
    def channels(self) -> int:
        """Channels of a latent."""
        return int(self.autoencoder.config.latent_channels)

    @property
    def downsampling(self) -> int:
        """Pixels per latent, along each side."""
        return _downsampling(self.autoencoder.config.block_out_channels)

    def fingerprint(self) -> str:
        """16 hex digits that other weights, another scale or shift would change."""
        return fingerprint_of(self.autoencoder, [self.scale, self.shift])

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Self:
        """Moves the autoencoder, which computes in float32 unless it was, or is here, given in another precision."""
        self.autoencoder.to(device, dtype)
        return self

    @torch.no_grad()
    def encode(self, images_BCHW: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Latents of images in [-1, 1], float32: the posterior's mode, or with a generator a sample of it."""
        posterior = self.autoencoder.encode(images_BCHW).latent_dist
        encoded_BCHW = posterior.mode() if generator is None else posterior.sample(generator)
        return (encoded_BCHW.float() - self.shift) * self.scale

    @torch.no_grad()
    def decode(self, latents_BCHW: Tensor) -> Tensor:
        """Images of latents, about [-1, 1], not clamped; float32."""
        scaled_BCHW = (latents_BCHW / self.scale + self.shift).to(self.autoencoder.dtype)
        return self.autoencoder.decode(scaled_BCHW).sample.float()


def require_sizes(config: LatentsConfig, about: Mapping[str, Any], channels: int | None = None) -> None:
    """Raise ConfigError if an autoencoder's own configuration names other sizes than the run's.

    `channels`: those of the run's latents; None: any.
    """
    blocks, own = about.get("block_out_channels"), about.get("latent_channels")
    if blocks is not None and (downsampling := _downsampling(blocks)) != config.downsampling:
        raise ConfigError(
            f"autoencoder {config.autoencoder}: has {downsampling} pixels a latent along each side, not"
            f" {config.downsampling}",
            Begin(field="data.latents.downsampling", value=f"{downsampling}"),
        )
    if channels is not None and own not in (None, channels):
        fix = Begin(field="data.channels", value=f"{own}")
        raise ConfigError(f"autoencoder {config.autoencoder} makes {own} channels, not {channels}", fix)


def require_known_autoencoder(config: LatentsConfig, channels: int) -> None:
    """`require_sizes` of the folder, or what this machine's cache has; of an autoencoder elsewhere nothing is known."""
    folder = network_folder(config.autoencoder)
    if folder is not None and (folder / third_party.CONFIG).is_file():  # else loading it says so
        require_sizes(config, third_party.read_json(folder / third_party.CONFIG), channels)


def _downsampling(blocks: Sized) -> int:
    return 2 ** (len(blocks) - 1)
