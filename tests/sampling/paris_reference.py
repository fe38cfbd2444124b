"""A checkpoint of Paris's layout with random weights, and what its networks compute, in plain torch functions.

Written from the papers' descriptions, names as in facebookresearch/DiT and PixArt-alpha; knows nothing of ours.
Shapes: B rows, N patches, D width, L text tokens, E their channels, h heads, p patch size.
"""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from ddm_ray.errors import DDMError
from ddm_ray.pipeline import DDMPipeline
from tests.sampling import tiny_components

SIZE, CHANNELS, NUM_EXPERTS = 8, 4, 3
Weights = dict[str, Tensor]

EXPERT: dict[str, Any] = {
    "model_type": "dit_expert",
    "architecture": "dit",
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 2,
    "patch_size": 2,
    "in_channels": CHANNELS,
    "out_channels": CHANNELS,
    "mlp_ratio": 4.0,
    "use_text_conditioning": True,
    "use_class_conditioning": False,
    "num_classes": 1000,
    "text_embed_dim": tiny_components.TEXT_DIM,
    "use_dit_time_embed": True,
    "use_adaln_single": True,
    "cfg_dropout_prob": 0.1,
}
ROUTER: dict[str, Any] = {
    "model_type": "router",
    "architecture": "dit",
    "num_clusters": NUM_EXPERTS,
    "hidden_size": 8,
    "num_layers": 1,
    "num_heads": 2,
    "patch_size": 2,
    "in_channels": CHANNELS,
    "use_dit_time_embed": True,
}
LABELLED = EXPERT | {
    "use_text_conditioning": False,
    "use_class_conditioning": True,
    "num_classes": 5,
    "use_adaln_single": False,
}


def write(folder: Path) -> Path:
    """A whole checkpoint of NUM_EXPERTS experts, seeded by their numbers."""
    folder.mkdir(parents=True)
    about = {"model_name": "Paris", "num_experts": NUM_EXPERTS, "image_size": SIZE, "num_channels": CHANNELS}
    _json(folder / "config.json", about | {"expert_architecture": "dit", "use_latents": True})
    index = {"vae": ["diffusers", "AutoencoderKL"], "text_encoder": ["transformers", "CLIPTextModel"]}
    index |= {"_class_name": "DDMPipeline", "num_experts": NUM_EXPERTS, "tokenizer": ["transformers", "CLIPTokenizer"]}
    _json(folder / "model_index.json", index)
    for number in range(NUM_EXPERTS):
        place = folder / f"expert_{number}"
        place.mkdir()
        _json(place / "config.json", EXPERT | {"expert_id": number})
        save_file(weights(EXPERT, number), place / "diffusion_pytorch_model.safetensors")
    (folder / "router").mkdir()
    _json(folder / "router/config.json", ROUTER)
    save_file(weights(ROUTER, 100), folder / "router/pytorch_model.safetensors")
    encoder = tiny_components.text_encoder(folder / "tokenizer")
    encoder.tokenizer.save_pretrained(folder / "tokenizer")
    encoder.model.save_pretrained(folder / "text_encoder")
    tiny_components.autoencoder().save_pretrained(folder / "vae")
    return folder


def weights(config: dict[str, Any], seed: int) -> Weights:
    """Random tensors of a network of this config, by their names."""
    width, patch = config["hidden_size"], config["patch_size"]
    router, single = config["model_type"] == "router", config.get("use_adaln_single", False)
    linear = {"t_embedder.mlp.0": (width, 256), "t_embedder.mlp.2": (width, width)}
    shapes: dict[str, tuple[int, ...]] = {
        "x_embedder.proj.weight": (width, config["in_channels"], patch, patch),
        "x_embedder.proj.bias": (width,),
    }
    if config.get("use_text_conditioning"):
        linear |= {"y_embedder.y_proj.fc1": (width, config["text_embed_dim"]), "y_embedder.y_proj.fc2": (width, width)}
    if config.get("use_class_conditioning"):
        shapes["y_embedder.embedding_table.weight"] = (config["num_classes"] + 1, width)
    if single:
        linear["t_block.1"] = (6 * width, width)
        shapes["final_layer.scale_shift_table"] = (2, width)
    else:
        linear["final_layer.adaLN_modulation.1"] = (2 * width, width)
    for number in range(config["num_layers"]):
        block = f"blocks.{number}."
        linear |= {block + "attn.qkv": (3 * width, width), block + "attn.proj": (width, width)}
        linear |= {block + "mlp.fc1": (4 * width, width), block + "mlp.fc2": (width, 4 * width)}
        if config.get("use_text_conditioning"):
            linear |= {block + "cross_attn.q_linear": (width, width), block + "cross_attn.proj": (width, width)}
            linear[block + "cross_attn.kv_linear"] = (2 * width, width)
        if single:
            shapes[block + "scale_shift_table"] = (6, width)
        else:
            linear[block + "adaLN_modulation.1"] = (6 * width, width)
    if router:
        linear["head"] = (config["num_clusters"], width)
        shapes["cls_token"] = (1, 1, width)
    else:
        linear["final_layer.linear"] = (patch * patch * config["out_channels"], width)
    for name, (out, into) in linear.items():
        shapes |= {f"{name}.weight": (out, into), f"{name}.bias": (out,)}
    generator = torch.Generator().manual_seed(seed)
    drawn = {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return drawn | {"pos_embed": positions(SIZE // patch, width)[None]}


def expert(w: Weights, config: dict[str, Any], x: Tensor, t: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
    """What an expert tells of x (B, C, H, W) and its own time t in [0, 1]; tokens: text, or labels (B,)."""
    width, patch = config["hidden_size"], config["patch_size"]
    image = _patches(w, x, patch)
    time = _time(w, t)
    if config["use_text_conditioning"]:
        text = _mlp(w, "y_embedder.y_proj", tokens)
        shared = _linear(w, "t_block.1", F.silu(time)).reshape(-1, 6, width)
    else:
        time = time + w["y_embedder.embedding_table.weight"][tokens]
    for number in range(config["num_layers"]):
        block = f"blocks.{number}."
        if config["use_adaln_single"]:
            six = w[block + "scale_shift_table"] + shared
        else:
            six = _linear(w, block + "adaLN_modulation.1", F.silu(time)).reshape(-1, 6, width)
        image = _block(w, block, image, six, config["num_heads"], (text, mask) if mask is not None else None)
    if config["use_adaln_single"]:
        two = w["final_layer.scale_shift_table"] + time[:, None]
    else:
        two = _linear(w, "final_layer.adaLN_modulation.1", F.silu(time)).reshape(-1, 2, width)
    values = _linear(w, "final_layer.linear", _modulated(image, two[:, 0], two[:, 1]))
    painted = torch.empty_like(x)
    across = x.shape[3] // patch
    for n in range(values.shape[1]):
        row, column = patch * (n // across), patch * (n % across)
        square = values[:, n].reshape(-1, patch, patch, config["out_channels"])
        painted[:, :, row : row + patch, column : column + patch] = square.permute(0, 3, 1, 2)
    return painted


def router(w: Weights, config: dict[str, Any], x: Tensor, t: Tensor) -> Tensor:
    """Logits (B, K)."""
    width, time = config["hidden_size"], _time(w, t)
    tokens = torch.cat([w["cls_token"].expand(len(x), 1, width), _patches(w, x, config["patch_size"])], dim=1)
    for number in range(config["num_layers"]):
        six = _linear(w, f"blocks.{number}.adaLN_modulation.1", F.silu(time)).reshape(-1, 6, width)
        tokens = _block(w, f"blocks.{number}.", tokens, six, config["num_heads"], None)
    two = _linear(w, "final_layer.adaLN_modulation.1", F.silu(time)).reshape(-1, 2, width)
    return _linear(w, "head", _modulated(tokens, two[:, 0], two[:, 1])[:, 0])


def positions(grid: int, width: int) -> Tensor:
    """(N, D): half for the column, half for the row, each of sines and then cosines."""
    table = torch.zeros(grid * grid, width, dtype=torch.float64)
    quarter = width // 4
    for row in range(grid):
        for column in range(grid):
            for i in range(quarter):
                frequency = 10_000 ** (-i / quarter)
                for half, place in ((0, column), (1, row)):
                    at = half * width // 2 + i
                    table[row * grid + column, at] = math.sin(place * frequency)
                    table[row * grid + column, at + quarter] = math.cos(place * frequency)
    return table.float()


def _patches(w: Weights, x: Tensor, patch: int) -> Tensor:
    embedded = F.conv2d(x, w["x_embedder.proj.weight"], w["x_embedder.proj.bias"], stride=patch)
    return embedded.flatten(2).transpose(1, 2) + w["pos_embed"]


def _time(w: Weights, t: Tensor) -> Tensor:
    angles = 1000 * t[:, None] * 10_000 ** (-torch.arange(128, dtype=t.dtype) / 128)
    features = torch.cat([torch.cos(angles), torch.sin(angles)], dim=1).to(w["t_embedder.mlp.0.weight"])
    return _linear(w, "t_embedder.mlp.2", F.silu(_linear(w, "t_embedder.mlp.0", features)))


def _block(
    w: Weights, block: str, x: Tensor, six: Tensor, heads: int, text_and_mask: tuple[Tensor, Tensor] | None
) -> Tensor:
    shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = six.unbind(1)
    query, key, value = _linear(w, block + "attn.qkv", _modulated(x, shift_a, scale_a)).chunk(3, dim=2)
    x = x + gate_a[:, None] * _linear(w, block + "attn.proj", _attend(query, key, value, heads, None))
    if text_and_mask is not None:
        text, mask = text_and_mask
        query = _linear(w, block + "cross_attn.q_linear", x)
        key, value = _linear(w, block + "cross_attn.kv_linear", text).chunk(2, dim=2)
        x = x + _linear(w, block + "cross_attn.proj", _attend(query, key, value, heads, mask))
    return x + gate_m[:, None] * _mlp(w, block + "mlp", _modulated(x, shift_m, scale_m))


def _attend(query: Tensor, key: Tensor, value: Tensor, heads: int, mask: Tensor | None) -> Tensor:
    mixed = []
    for q, k, v in zip(query.chunk(heads, 2), key.chunk(heads, 2), value.chunk(heads, 2), strict=True):
        scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[2])
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, :], -math.inf)
        mixed.append(scores.softmax(dim=2) @ v)
    return torch.cat(mixed, dim=2)


def _modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[2:], eps=1e-6) * (1 + scale[:, None]) + shift[:, None]


def _mlp(w: Weights, name: str, x: Tensor) -> Tensor:
    return _linear(w, name + ".fc2", F.gelu(_linear(w, name + ".fc1", x), approximate="tanh"))


def _linear(w: Weights, name: str, x: Tensor) -> Tensor:
    return x @ w[name + ".weight"].T + w[name + ".bias"]


def check_refused(
    checkpoint: Path, tmp_path: Path, fault: Callable[[Path], Any], kind: type[DDMError], message: str
) -> None:
    """A copy of the checkpoint with this fault is refused by an error of exactly this kind, in one line."""
    root = shutil.copytree(checkpoint, tmp_path / "checkpoint")
    fault(root)
    with pytest.raises(kind, match=message) as raised:
        DDMPipeline.from_pretrained(root)
    assert type(raised.value) is kind
    assert "\n" not in str(raised.value)


def _json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value))
