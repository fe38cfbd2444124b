"""Training state: one fp32 record per parameter (value, both Adam moments, EMA), gathered over ZeRO's shards."""

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from ddm_ray.errors import CorruptArtifact, TrainingError
from ddm_ray.train.engine import RECORDS, VALUE, Engine

FILE = "state.safetensors"


def gather(engine: Engine) -> dict[str, Tensor]:
    """All of the state on every rank, as `<record>/<parameter>` -> fp32 CPU tensor. Every rank must take part."""
    return {
        f"{record}/{name}": engine.full(parameter, record).cpu().contiguous()
        for name, parameter in engine.model.named_parameters()
        for record in RECORDS
    }


def to_bytes(tensors: dict[str, Tensor]) -> bytes:
    """A gathered state as safetensors."""
    return save(tensors)


def from_bytes(data: bytes, model: nn.Module, where: str) -> dict[str, Tensor]:
    """The state in `data`, checked against the model's parameters by name and shape. Raises CorruptArtifact."""
    tensors = load(data)
    wanted = {f"{record}/{name}": parameter.shape for name, parameter in model.named_parameters() for record in RECORDS}
    if {key: tensor.shape for key, tensor in tensors.items()} != wanted:
        odd = sorted(wanted.keys() ^ tensors.keys()) or sorted(k for k in wanted if tensors[k].shape != wanted[k])
        raise CorruptArtifact(f"{where}: not a state of this model, see {odd[0]}; delete that folder and go on")
    return tensors


def load_values(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Set the model's parameters; do it before the Engine is built around it, which copies them."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[f"{VALUE}/{name}"])


def restore(engine: Engine, tensors: dict[str, Tensor], step: int) -> None:
    """Set master values, moments, EMA and AdamW's step count, then check that the engine gives them back.

    Raises TrainingError if it doesn't: a half-loaded state would train on as if nothing had happened.
    """
    for name, parameter in engine.model.named_parameters():
        for record in RECORDS:
            engine.set_full(parameter, record, tensors[f"{record}/{name}"])
    engine.set_adam_step(step)
    found = gather(engine)
    wrong = [key for key, tensor in tensors.items() if not torch.equal(found[key], tensor)]
    if wrong:
        raise TrainingError(f"state of step {step} didn't load: {wrong[0]} differs from what was saved")
