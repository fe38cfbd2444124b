"""Models as safetensors bytes beside a JSON spec {"class": ..., "config": {...}}; never pickle.

A spec may say under "flow" which path and prediction its network was trained for; no network is built from it. Under
"adapter" it may say what is trained beside a frozen network: the tensors are then those of the adapter alone, and a
network with the others is the `base`.
"""

import json
from collections.abc import Mapping
from contextlib import nullcontext
from pkgutil import resolve_name
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ddm_ray.config.networks import NETWORKS
from ddm_ray.errors import ConfigError, CorruptArtifact
from ddm_ray.models.adapters import adapt, base_name, is_adapted, is_of_adapter, trained_state
from ddm_ray.models.network import Network, fill_tables

# Imported only when a spec names one: diffusers is an extra.
MODELS = {name: settings.code for name, settings in NETWORKS.items()} | {"Router": "ddm_ray.models.router:Router"}


LINEAR = {"path": "linear", "prediction": "velocity"}
"""The flow of a spec that names none."""
# Bytes of a number, and of a tensor's entry in the header of safetensors with its name, at most.
_WIDEST, _HEADER = 8, 2**12


def spec_of_model(model: Network) -> dict[str, Any]:
    """The spec that `build` makes the same architecture from."""
    spec = {"class": type(model).__name__, "config": dict(model.config)}
    return spec if model.adapter is None else {**spec, "adapter": model.adapter}


def base_spec(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The spec of a network without its adapter."""
    return {name: value for name, value in spec.items() if name != "adapter"}


def build(spec: dict[str, Any], device: str = "cpu", filled: bool = True) -> Network:
    """A freshly initialised model of this spec; CorruptArtifact if the spec isn't one of ours.

    On device "meta" it has shapes and names but no memory: enough to count, and to plan. Not `filled`, its parameters
    are whatever memory holds, for a caller that reads all of them next.
    """
    if "adapter" in spec:
        base = build(base_spec(spec), device, filled)
        with torch.device(device), nullcontext() if filled and device != "meta" else _Unfilled():
            return adapt(base, spec["adapter"])
    name, config = spec.get("class"), spec.get("config")
    if name not in MODELS or not isinstance(config, dict):
        raise CorruptArtifact(f"model spec: class {name!r} with a config is not one of {sorted(MODELS)}")
    model_class = _class_of(name)
    try:
        with torch.device("meta"), _Unfilled():
            model = model_class(**config)
    except (ArithmeticError, RuntimeError, TypeError, ValueError, ConfigError) as error:
        raise CorruptArtifact(
            f"model spec: config of {name} doesn't build one: {' '.join(str(error).split())}"
        ) from error
    if device == "meta":
        return model
    # Outside: running out of memory says nothing about the spec.
    with torch.device(device), nullcontext() if filled else _Unfilled():
        return model_class(**config)


def complete_spec(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The spec as JSON has it, with all that it leaves to its class, and the flow that it leaves out."""
    config = spec.get("config")
    if spec.get("class") not in MODELS or not isinstance(config, dict):
        return dict(spec)
    defaults = _class_of(spec["class"]).defaults()
    full: dict[str, Any] = json.loads(json.dumps({"flow": LINEAR, **spec, "config": {**defaults, **config}}))
    return full


def _class_of(name: str) -> type[Network]:
    model_class: type[Network] = resolve_name(MODELS[name])
    return model_class


def most_bytes(spec: dict[str, Any]) -> int:
    """Bytes that a file of the weights of this spec has at most, whatever the numbers are kept in."""
    tensors = trained_state(build(spec, "meta"))
    return sum(_WIDEST * tensor.numel() for tensor in tensors.values()) + _HEADER * (len(tensors) + 1)


class _Unfilled(TorchFunctionMode):
    """Leaves tensors as torch.nn.init finds them.

    To draw numbers without memory torch loads its compiler for 2 s; with memory 3B of them take 24 s.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Some of its functions are looked up themselves, of others what they call.
        if getattr(func, "__module__", None) == nn.init.__name__ or func in (Tensor.uniform_, Tensor.normal_):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def weights_as_bytes(model_or_state: nn.Module | dict[str, Tensor], spec: dict[str, Any]) -> tuple[bytes, str]:
    """(safetensors bytes, spec as JSON) of a model or of a state dict of its shape, such as an EMA."""
    state = trained_state(model_or_state) if isinstance(model_or_state, nn.Module) else model_or_state
    # Cloned, since safetensors refuses tensors that share memory.
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}
    return tensors_to_bytes(tensors), json.dumps(spec, indent=2, sort_keys=True)


def load_model(spec: dict[str, Any], weights: bytes, base: Network | None = None) -> Network:
    """The model of `spec` with these weights, in eval mode, on the CPU. `base`: see `from_state`.

    CorruptArtifact names the tensor that is missing, unknown or of another shape.
    """
    try:
        tensors = tensors_from_bytes(weights)
    except SafetensorError as error:
        raise CorruptArtifact(f"weights are not whole safetensors ({error}): fetch or write them again") from error
    return from_state(spec, tensors, base)


def from_state(spec: dict[str, Any], tensors: dict[str, Tensor], base: Network | None = None) -> Network:
    """Make the network from tensors by name, as `load_model` does.

    They are taken out of `tensors` one by one, so that none is held twice. `base`: the network that an adapter was
    trained beside. The new one shares its tensors, without copies.
    """
    # Without memory first: to initialise a large network takes longer than to read it.
    model = build(spec, "meta")
    expected = trained_state(model)
    _check(expected, tensors, spec["class"])
    require_finite_weights(tensors)
    # Copied into memory aligned as torch's own, so that a loaded model computes to the bit what the saved one did.
    state = {name: tensors.pop(name).to(tensor.dtype, copy=True) for name, tensor in expected.items()}
    if is_adapted(model):
        _require_base(spec, base)
        assert base is not None
        share_tensors(base, model)
        object.__setattr__(model, "base", base)  # not as a part of the network
    else:
        fill_tables(model)
        if any(buffer.is_meta for name, buffer in model.named_buffers() if name not in state):
            model = build(spec)
    model.load_state_dict(state, assign=True, strict=not is_adapted(model))
    return model.eval()


def _require_base(spec: Mapping[str, Any], base: Network | None) -> None:
    """Raise CorruptArtifact unless this is the network that an adapter of the spec is beside."""
    if base is None:
        raise CorruptArtifact("the weights are those of an adapter: it needs its base, and there is none")
    asked = {name: spec.get(name) for name in ("class", "config")}
    if complete_spec(asked) != complete_spec(spec_of_model(base)):
        raise CorruptArtifact("the weights are those of an adapter of another network than this base")


def share_tensors(base: Network, model: Network) -> None:
    """Give a network the parameters and buffers of its base, themselves: where one moves, the other one moves, too.

    Those of an adapter stay as they are.
    """
    tensors = {**dict(base.named_buffers()), **dict(base.named_parameters())}
    for name, tensor in [*model.named_buffers(), *model.named_parameters()]:
        if not is_of_adapter(name):
            holder, _, last = name.rpartition(".")
            shared = tensors[base_name(name)]
            if isinstance(tensor, nn.Parameter):
                shared.requires_grad_(False)
            setattr(model.get_submodule(holder), last, shared)


def require_finite_weights(tensors: Mapping[str, Tensor]) -> None:
    """Raise CorruptArtifact for a tensor with a number that isn't finite."""
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise CorruptArtifact(f"weights: tensor {name} has numbers that aren't finite")


def _check(expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor], name_of_class: str) -> None:
    for name, tensor in expected.items():
        if name not in tensors:
            raise CorruptArtifact(f"weights lack the tensor {name} of shape {tuple(tensor.shape)}")
        if tensors[name].shape != tensor.shape:
            raise CorruptArtifact(
                f"weights: tensor {name} has shape {tuple(tensors[name].shape)}, expected {tuple(tensor.shape)}"
            )
    if unknown := sorted(tensors.keys() - expected.keys()):
        raise CorruptArtifact(f"weights have a tensor {unknown[0]} that a {name_of_class} doesn't know")
