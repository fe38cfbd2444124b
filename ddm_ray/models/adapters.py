"""Adapters of networks by peft: low-rank matrices beside linear layers of a frozen network (LoRA, arXiv 2106.09685).

An adapted network is the network with peft's layers in the place of its own. Its own tensors are those of the adapter;
all others are the base's, and may be shared by many.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ddm_ray.errors import ConfigError
from ddm_ray.models.network import Network
from ddm_ray.spelling import some

_OF_ADAPTER = (".lora_A.", ".lora_B.")
_OF_BASE = ".base_layer."


def adapt(model: Network, adapter: Mapping[str, Any]) -> Network:
    """Freeze a network, and put an adapter of this `rank`, `alpha` and `targets` beside its layers; returns it.

    Raises ConfigError for a target that no linear layer has, and without peft.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise ConfigError("an adapter needs peft: install it with: pip install 'ddm-ray[adapters]'") from None
    rank, alpha = adapter["rank"], adapter.get("alpha")
    config = LoraConfig(
        r=rank, lora_alpha=rank if alpha is None else alpha, target_modules=layers_of(model, adapter["targets"])
    )
    model.requires_grad_(False)
    # Without low_cpu_mem_usage, which replaces a function of torch for all threads.
    inject_adapter_in_model(config, model)
    model.adapter = dict(adapter)
    return model


def layers_of(model: nn.Module, targets: Sequence[str]) -> list[str]:
    """Names of the linear layers that have an adapter. A target is a layer's name, or how it ends from a dot on.

    Raises ConfigError for a target that no linear layer has.
    """
    # Others compute more than a product, even if they are subclasses of Linear.
    linear = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    chosen = set[str]()
    for target in targets:
        named = {name for name in linear if name == target or name.endswith(f".{target}")}
        if not named:
            known = some(sorted({last for name in linear if not (last := name.rpartition(".")[2]).isdigit()}))
            raise ConfigError(f"expert.adapter.targets: {target!r} is no linear layer of the network: it has {known}")
        chosen |= named
    return [name for name in linear if name in chosen]


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """The layers of an adapted network that have an adapter, as peft's modules, by name."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


def is_adapted(model: object) -> bool:
    """True for a network with an adapter."""
    return isinstance(model, Network) and model.adapter is not None


def trained_state(model: nn.Module) -> dict[str, Tensor]:
    """Tensors of a network that training makes, by name: those of the adapter if it is adapted, else all."""
    state = model.state_dict()
    return {name: state[name] for name in state if is_of_adapter(name)} if is_adapted(model) else state


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of a network that are trained, by name: see `trained_state`."""
    named = dict(model.named_parameters())
    return {name: named[name] for name in named if is_of_adapter(name)} if is_adapted(model) else named


@torch.no_grad()
def merged_state(model: nn.Module) -> dict[str, Tensor]:
    """All tensors of an adapted network as those of the network without an adapter that predicts the same."""
    state = model.state_dict()
    merged = {base_name(name): tensor for name, tensor in state.items() if not is_of_adapter(name)}
    for name, layer in adapted_layers(model).items():
        merged[f"{name}.weight"] = merged[f"{name}.weight"] + layer.get_delta_weight("default")
    return merged


def is_of_adapter(name: str) -> bool:
    """True for a tensor of an adapter, by its name in an adapted network."""
    return any(part in name for part in _OF_ADAPTER)


def base_name(name: str) -> str:
    """The name that a tensor of an adapted network, not one of the adapter, has in the network without it."""
    return name.replace(_OF_BASE, ".")
