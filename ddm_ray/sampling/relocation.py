"""Components on another device, in another precision, or offloaded: their networks move, as torch's modules do."""

from dataclasses import replace

import torch
from torch import nn

from ddm_ray.errors import SamplingError
from ddm_ray.sampling.components import Components
from ddm_ray.sampling.offload import Offloaded, OffloadedToHost


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


def offloaded(components: Components, device: str) -> Components:
    """The components with experts in host memory, two of them at a time also on the device, where all else is.

    SamplingError for experts that are offloaded already, or no networks.
    """
    models = components.models
    experts, dtype = models.experts, models.dtype
    if isinstance(experts, Offloaded):
        raise SamplingError("the experts are offloaded already: leave it out")
    networks = [experts[expert] for expert in range(len(experts))]
    if any(not isinstance(network, nn.Module | None) for network in networks):
        raise SamplingError("experts that are no networks of torch can't be offloaded")

    def load(expert: int) -> nn.Module:
        network = networks[expert]
        assert isinstance(network, nn.Module)
        return network.to("cpu")

    host = OffloadedToHost(load, [network is not None for network in networks], device)
    host.dtype = dtype
    return move_components(replace(components, models=replace(models, experts=host, device=device)), device, None)


def _place(device: str) -> tuple[str, int]:
    named = torch.device(device)
    return named.type, named.index or 0


def _move(network: object, device: str, dtype: torch.dtype | None) -> None:
    if isinstance(network, nn.Module):
        network.to(device, dtype)
