"""Words on a pipeline: its experts, router and other networks, their sizes, and the settings that it samples with."""

from typing import Any

from torch import nn

from ddm_ray.sampling.components import Components, bare
from ddm_ray.sampling.offload import Offloaded, OffloadedToDisk


def described(components: Components) -> str:
    """A line for each kind of component, for people."""
    models, info, defaults = components.models, components.models.info, components.defaults
    channels, height, width = info.image_shape
    lines = {
        "experts": _experts(models.experts, len(models.experts)),
        "router": _network(models.router) if models.router is not None else "none",
        "computes": f"on {models.device} in {_word(models.dtype)}",
        "images": f"{channels} x {height} x {width}, {_conditions(components)}",
    }
    if (encoder := components.text_encoder) is not None:
        pooled = f", and {_network(encoder.pooled.model)}" if encoder.pooled else ""
        lines["text encoder"] = f"{_network(encoder.model)}{pooled}, {encoder.tokens} tokens"
    if (latents := components.latents) is not None:
        side = latents.downsampling
        lines["autoencoder"] = f"{_network(latents.autoencoder)}, pictures of {height * side} x {width * side}"
    strategy = f"strategy {defaults.strategy_or_once}, " if info.num_experts > 1 else ""
    guidance = f"guidance_scale {defaults.guidance_scale:g}"
    lines["by default"] = f"{strategy}{defaults.solver}, {defaults.steps} steps, {guidance}"
    rows = "\n".join(f"  {name}: {text}" for name, text in lines.items())
    return f"DDMPipeline(\n{rows}\n)"


def _experts(experts: Any, count: int) -> str:
    if isinstance(experts, Offloaded):
        where = "files" if isinstance(experts, OffloadedToDisk) else "host memory"
        absent = experts.present.count(False)
        what = f"{count}, {experts.resident} at a time on the device, all in {where}"
    else:
        networks = [experts[expert] for expert in range(count)]
        absent = networks.count(None)
        kinds = dict.fromkeys(_network(network) for network in networks if network is not None)
        what = f"{count} x {kinds.popitem()[0]}" if len(kinds) == 1 else f"{count}: {', '.join(kinds)}"
    return f"{what}; {absent} not there" if absent else what


def _network(model: Any) -> str:
    network = bare(model)
    if not isinstance(network, nn.Module):
        return type(network).__name__
    return f"{type(network).__name__} of {_amount(sum(tensor.numel() for tensor in network.parameters()))} parameters"


def _amount(count: int) -> str:
    for unit, size in (("billion", 1e9), ("million", 1e6), ("thousand", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count}"


def _conditions(components: Components) -> str:
    names, count = components.class_names, components.models.info.num_classes
    if count is None:
        return "of texts"
    if not count:
        return "of no condition"
    some = f": {', '.join(names[:6])}{', ...' if len(names) > 6 else ''}" if names else ""
    return f"of {count} classes{some}"


def _word(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
