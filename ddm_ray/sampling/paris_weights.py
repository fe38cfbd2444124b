"""The tensors of checkpoints laid out as Paris's, by name, form and time; see `sampling.paris`.

Shapes: C channels, D width, p patch size, N patches.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from ddm_ray.errors import ConfigError, CorruptArtifact, MissingArtifact, TruncatedWeights
from ddm_ray.models import weights
from ddm_ray.models.dit import TIME_FREQUENCIES, position_table
from ddm_ray.models.third_party import brief

POSITIONS = "trunk.positions_1ND"
"""Not a weight of ours, but fixed; a table in a file must be that one."""

NAMES: dict[str, str] = {
    "x_embedder.proj": "trunk.patch_in",
    "pos_embed": POSITIONS,
    "t_embedder.mlp.0": "trunk.time_in.0",
    "t_embedder.mlp.2": "trunk.time_in.2",
    "y_embedder.embedding_table": "trunk.label_in",
    "y_embedder.y_proj.fc1": "trunk.text_in.fc1",
    "y_embedder.y_proj.fc2": "trunk.text_in.fc2",
    "t_block.1": "trunk.shared_modulation",
    "blocks.N.attn.qkv": "trunk.blocks.N.attention.qkv",
    "blocks.N.attn.proj": "trunk.blocks.N.attention.proj",
    "blocks.N.cross_attn.q_linear": "trunk.blocks.N.cross_attention.query",
    "blocks.N.cross_attn.kv_linear": "trunk.blocks.N.cross_attention.key_value",
    "blocks.N.cross_attn.proj": "trunk.blocks.N.cross_attention.out",
    "blocks.N.mlp.fc1": "trunk.blocks.N.mlp.fc1",
    "blocks.N.mlp.fc2": "trunk.blocks.N.mlp.fc2",
    "blocks.N.scale_shift_table": "trunk.blocks.N.modulation.table_MD",
    "blocks.N.adaLN_modulation.1": "trunk.blocks.N.modulation",
    "final_layer.scale_shift_table": "trunk.modulation_out.table_MD",
    "final_layer.adaLN_modulation.1": "trunk.modulation_out",
    "final_layer.linear": "head",
    "cls_token": "cls_D",
    "head": "head",
}
"""Their name -> ours, of tensors, or of modules with a weight and a bias; N is the number of a block."""

TimeDirection = Literal["noise-at-1", "noise-at-0"]


@dataclass(frozen=True)
class Reading:
    """Rules for reading the files. `names`: as NAMES, for what it doesn't know; None leaves a tensor out, on purpose.

    `time`: with "noise-at-1" (the default: a guess, as DiT's timesteps grow with noise) the networks' time and
    velocity are ours, noise - data. With "noise-at-0" theirs is data - noise at 1 - t; both are folded into the
    first and the last weights. The wrong one gives images of pure noise.
    """

    names: Mapping[str, str | None] = field(default_factory=dict)
    time: TimeDirection = "noise-at-1"

    def __post_init__(self) -> None:
        if self.time not in ("noise-at-1", "noise-at-0"):
            raise ConfigError(f"time is {self.time!r}: use noise-at-1 or noise-at-0")
        for theirs, ours in self.names.items():
            if not isinstance(theirs, str) or not isinstance(ours, str | None):
                raise ConfigError(
                    f"names: {theirs!r} is {ours!r}: give our name of the tensor, or None to leave it out"
                )


def load_network(path: Path, spec: dict[str, Any], reading: Reading | None = None) -> nn.Module:
    """A DiT or Router of this spec from a file of theirs, in eval mode; every tensor of it is used or refused."""
    reading = reading or Reading()
    if not path.is_file():
        raise MissingArtifact(f"{path} is missing: fetch it again")
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise TruncatedWeights(f"{path}: not whole safetensors ({brief(error)}); fetch it again") from None
    expected_state = weights.build(spec, "meta").state_dict()
    state: dict[str, Tensor] = {}
    sources: dict[str, str] = {}
    for name, tensor in tensors.items():
        ours = _our_name(name, reading.names, path)
        if ours is None:
            continue
        if ours == POSITIONS:
            _require_positions(tensor, spec, f"{path}: tensor {name}")
            continue
        if ours in sources:
            raise CorruptArtifact(f"{path}: tensors {sources[ours]} and {name} are both our {ours}")
        sources[ours], state[ours] = name, tensor
    for ours, expected in expected_state.items():
        if ours not in state:
            raise CorruptArtifact(f"{path}: lacks the tensor {_their_name(ours)} (our {ours})")
        shape = _their_shape(ours, tuple(expected.shape), spec)
        if tuple(state[ours].shape) != shape:
            raise CorruptArtifact(
                f"{path}: tensor {sources[ours]} has shape {tuple(state[ours].shape)}, expected {shape}"
            )
        state[ours] = _in_our_order(ours, state[ours].to(expected.dtype), spec)
    if unknown := sorted(state.keys() - expected_state.keys()):
        raise CorruptArtifact(f"{path}: tensor {sources[unknown[0]]} (our {unknown[0]}) is none of a {spec['class']}'s")
    if reading.time == "noise-at-0":
        _reverse_time(state, spec["class"])
    return weights.from_state(spec, state)


def _our_name(name: str, names: Mapping[str, str | None], path: Path) -> str | None:
    """Ours for their tensor: by the caller's table, then by NAMES, whole or without .weight or .bias."""
    number = re.match(r"blocks\.(\d+)\.", name)
    general = re.sub(r"^blocks\.\d+\.", "blocks.N.", name)
    stem, _, suffix = general.rpartition(".")
    for table in (names, NAMES):
        for key, ending in ((name, ""), (general, ""), (stem, f".{suffix}")):
            if key in table:
                ours = table[key]
                return ours and ours.replace(".N.", f".{number[1]}." if number else ".N.") + ending
    raise CorruptArtifact(
        f"{path}: unknown tensor {name}: say what it is by names={{{name!r}: ours}}, None to leave it"
    )


def _their_name(ours: str) -> str:
    """For messages: the first of their names that NAMES has for our tensor."""
    general = re.sub(r"^trunk\.blocks\.\d+\.", "trunk.blocks.N.", ours)
    stem, _, suffix = general.rpartition(".")
    number = re.match(r"trunk\.blocks\.(\d+)\.", ours)
    for theirs, known in NAMES.items():
        if known in (general, stem):
            name = theirs if known == general else f"{theirs}.{suffix}"
            return name.replace("blocks.N.", f"blocks.{number[1]}." if number else "")
    return ours


def _their_shape(ours: str, shape: tuple[int, ...], spec: dict[str, Any]) -> tuple[int, ...]:
    if ours == "trunk.patch_in.weight":
        size = spec["config"]["patch_size"]
        return (shape[0], spec["config"]["channels"], size, size)
    return (1, 1, *shape) if ours == "cls_D" else shape


def _in_our_order(ours: str, tensor: Tensor, spec: dict[str, Any]) -> Tensor:
    """A convolution over patches as a linear layer of them, (p, p, C) rows of the last layer as our (C, p, p)."""
    if ours == "trunk.patch_in.weight":
        return tensor.flatten(1)
    if ours == "cls_D":
        return tensor.flatten()
    if ours in ("head.weight", "head.bias") and spec["class"] == "DiT":
        size = spec["config"]["patch_size"]
        return tensor.unflatten(0, (size, size, -1)).movedim(2, 0).flatten(0, 2).contiguous()
    return tensor


def _reverse_time(state: dict[str, Tensor], kind: str) -> None:
    """Makes a network of s = 1 - t that tells data - noise one of t that tells noise - data, in place.

    Cosine and sine of a - b, with a = 1000 f and b = 1000 f t, are combinations of those of b: the first layer
    of the time embedding takes them in.
    """
    weight = state["trunk.time_in.0.weight"]
    of_cos, of_sin = weight.double().chunk(2, dim=1)
    exponents = torch.arange(TIME_FREQUENCIES, dtype=torch.float64) / TIME_FREQUENCIES
    angles = 1000 * torch.exp(-math.log(10_000) * exponents)
    turned = [of_cos * angles.cos() + of_sin * angles.sin(), of_cos * angles.sin() - of_sin * angles.cos()]
    state["trunk.time_in.0.weight"] = torch.cat(turned, dim=1).to(weight.dtype)
    if kind == "DiT":
        state |= {name: -state[name] for name in ("head.weight", "head.bias")}


def _require_positions(tensor: Tensor, spec: dict[str, Any], where: str) -> None:
    config = spec["config"]
    grid, width = config["image_size"] // config["patch_size"], config["width"]
    # With a row for the CLS token, which is at position zero here.
    with_cls = spec["class"] == "Router" and tuple(tensor.shape) == (1, grid**2 + 1, width)
    # Before the table is made: whoever wrote the file named its size.
    if not with_cls and tuple(tensor.shape) != (1, grid**2, width):
        raise CorruptArtifact(f"{where} has shape {tuple(tensor.shape)}, expected {(1, grid**2, width)}")
    table_1ND = position_table(grid, width)
    if with_cls:
        table_1ND = torch.cat([torch.zeros_like(table_1ND[:, :1]), table_1ND], dim=1)
    if (difference := float((tensor.float() - table_1ND).abs().max())) > 1e-4:
        raise CorruptArtifact(f"{where} differs by {difference:.2g} from the fixed sine-cosine table: not importable")
