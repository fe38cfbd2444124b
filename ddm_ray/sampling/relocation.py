"""Components on another device, or in another precision: their networks move, as torch's modules do."""

from dataclasses import replace

import torch
from torch import nn

from ddm_ray.errors import SamplingError
from ddm_ray.sampling.components import Components
from ddm_ray.sampling.offload import Offloaded


def move_components(components: Components, device: str | None, dtype: torch.dtype | None) -> Components:
    """The components with all networks on the device, experts, router and text encoder in dtype; None: as they are.

    The autoencoder stays in its precision. SamplingError for experts that are offloaded, elsewhere or otherwise.
    """
    models = components.models
    experts, place = models.experts, models.device if device is None else device
    if isinstance(experts, Offloaded):
        if _place(place) != _place(models.device) or dtype not in (None, experts.dtype):
            raise SamplingError("offloaded experts stay where they are: open the pipeline with that device and dtype")
    else:
        for expert in range(len(experts)):
            _move(experts[expert], place, dtype)
    _move(models.router, place, dtype)
    if components.text_encoder is not None:
        components.text_encoder.to(place, dtype)
    if components.latents is not None:
        components.latents.to(place)
    return replace(components, models=replace(models, device=place))


def _place(device: str) -> tuple[str, int]:
    named = torch.device(device)
    return named.type, named.index or 0


def _move(network: object, device: str, dtype: torch.dtype | None) -> None:
    if isinstance(network, nn.Module):
        network.to(device, dtype)
