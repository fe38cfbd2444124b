"""Models as safetensors bytes beside a JSON spec {"class": ..., "config": {...}}; never pickle."""

import json
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor, nn

from ddm_ray.errors import ConfigError, CorruptArtifact
from ddm_ray.models.dit import DiT
from ddm_ray.models.router import Router

MODELS: dict[str, type[DiT] | type[Router]] = {"DiT": DiT, "Router": Router}


def describe(model: DiT | Router) -> dict[str, Any]:
    """The spec that `build` makes the same architecture from."""
    return {"class": type(model).__name__, "config": dict(model.config)}


def build(spec: dict[str, Any]) -> DiT | Router:
    """A freshly initialised model of this spec; CorruptArtifact if the spec isn't one of ours."""
    name, config = spec.get("class"), spec.get("config")
    if name not in MODELS or not isinstance(config, dict):
        raise CorruptArtifact(f"model spec: class {name!r} with a config is not one of {sorted(MODELS)}")
    try:
        return MODELS[name](**config)
    except (TypeError, ConfigError) as error:
        raise CorruptArtifact(f"model spec: config of {name} doesn't build one: {error}") from error


def to_bytes(model_or_state: nn.Module | dict[str, Tensor], spec: dict[str, Any]) -> tuple[bytes, str]:
    """(safetensors bytes, spec as JSON) of a model or of a state dict of its shape, such as an EMA."""
    state = model_or_state.state_dict() if isinstance(model_or_state, nn.Module) else model_or_state
    # Cloned, since safetensors refuses tensors that share memory.
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}
    return tensors_to_bytes(tensors), json.dumps(spec, indent=2, sort_keys=True)


def load(spec: dict[str, Any], weights: bytes) -> DiT | Router:
    """The model of `spec` with these weights, in eval mode, on the CPU.

    CorruptArtifact names the tensor that is missing, unknown or of another shape.
    """
    try:
        found = tensors_from_bytes(weights)
    except SafetensorError as error:
        raise CorruptArtifact(f"weights are not whole safetensors ({error}): fetch or write them again") from error
    model = build(spec)
    expected = model.state_dict()
    for name, tensor in expected.items():
        if name not in found:
            raise CorruptArtifact(f"weights lack the tensor {name} of shape {tuple(tensor.shape)}")
        if found[name].shape != tensor.shape:
            raise CorruptArtifact(
                f"weights: tensor {name} has shape {tuple(found[name].shape)}, expected {tuple(tensor.shape)}"
            )
    if unknown := sorted(found.keys() - expected.keys()):
        raise CorruptArtifact(f"weights have a tensor {unknown[0]} that a {spec['class']} doesn't know")
    with torch.no_grad():
        model.load_state_dict(found)
    return model.eval()
