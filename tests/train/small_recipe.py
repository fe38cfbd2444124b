"""A shipped recipe at a small size: its own kinds of data, text encoder, autoencoder and embedder, random weights."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import timm
import torch
from diffusers import AutoencoderKL
from PIL import Image
from safetensors.torch import save_file
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

from ddm_ray.config import (
    DataConfig,
    DenoiserConfig,
    DiffusersConfig,
    EmbedderConfig,
    RunConfig,
    load_recipe,
)
from tests.models.test_text import WORDS, tokenizer

CLUSTERS, ROWS = 2, 48
SMALL_VIT = {"embed_dim": 32, "depth": 1, "num_heads": 2}
"""Arguments that make any vision transformer of timm's small."""
TRAIN = {"steps": 2, "batch": 4, "warmup_steps": 0}


def smaller(name: str, folder: Path, more: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Settings that make a recipe small, with the images and the checkpoints they name written to `folder`.

    `more`: settings on top of the recipe's own, of which the kinds are kept as well.
    """
    config = load_recipe(name, more)
    size = 2 * max(_patch(config.expert.model), config.router.model.patch_size)
    fields: dict[str, Any] = {
        "data.image_size": size,
        "data.heldout": 0.25,
        "data.source": _source(config.data, folder / "images"),
        "partition.num_clusters": CLUSTERS,
        "partition.num_fine": 8,
        "router.model": config.router.model.model_dump() | {"width": 16, "depth": 1, "heads": 2},
        "expert.model": _small_network(config.expert.model),
        "sample.steps": 2,
        "evaluate.strategies": ["once"],
    }
    for part in ("expert", "router"):
        fields |= {f"{part}.train.{field}": value for field, value in TRAIN.items()}
    if config.data.text is not None:
        fields["data.text.encoder"] = _text_encoder(config.data.text.encoder, config.data.text.dim, folder)
        if config.data.text.pooled_encoder is not None:
            dim = config.data.text.pooled_dim
            assert dim is not None
            fields["data.text.pooled_encoder"] = _text_encoder(config.data.text.pooled_encoder, dim, folder)
    if config.data.latents is not None:
        fields["data.latents.autoencoder"] = _autoencoder(config.data, folder / "vae")
    fields |= _embedder(config.embedder, folder)
    return (*more, *(f"{field}={json.dumps(value)}" for field, value in fields.items()))


def prompts_of(config: RunConfig) -> dict[str, Any]:
    """What two images of a run may be asked for by: texts, or numbers of its classes; nothing where it knows that."""
    dropped = config.expert.train.condition_dropout > 0
    if config.data.text is not None:
        return {"prompt": ["a red cat", "" if dropped else "a moon"]}
    last = len(config.data.class_names) - 1
    return {"class_labels": [last, None if dropped else 0]}


def _patch(model: DenoiserConfig | DiffusersConfig) -> int:
    return int(model.patch_size)


def _small_network(model: DenoiserConfig | DiffusersConfig) -> dict[str, Any]:
    if isinstance(model, DenoiserConfig):
        return model.model_dump() | {"width": 16, "depth": 1, "heads": 2}
    layers = {name: min(1, count) for name, count in model.arguments.items() if name.endswith("_layers")}
    return {"name": model.name, "arguments": {**model.arguments, "num_attention_heads": 1, **layers}}


def _source(data: DataConfig, folder: Path) -> str:
    """Random images, as the source of the recipe has them: drawn ones, parquet, class folders, or captions."""
    kind, _, count = data.source.partition(":")
    if kind == "digits":
        return data.source
    if kind == "shapes" and count.isdigit():
        return f"shapes:{ROWS}"
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    images = [_png(generator.integers(0, 256, (24, 32, 3), np.uint8)) for _ in range(ROWS)]
    if data.text is None and not data.source.endswith(".parquet"):
        for number, image in enumerate(images):
            of_class = folder / f"class-{number % len(data.class_names)}"
            of_class.mkdir(exist_ok=True)
            (of_class / f"{number:03d}.png").write_bytes(image)
        return str(folder)
    table: dict[str, Any] = {"image": [{"bytes": image, "path": None} for image in images]}
    if data.text is None:
        table["label"] = [number % len(data.class_names) for number in range(ROWS)]
    else:
        table["caption"] = [" ".join(generator.choice(WORDS[4:], 1 + number % 11)) for number in range(ROWS)]
    pq.write_table(pa.table(table), folder / "train-0.parquet")
    return str(folder)


def _png(pixels_HWC: np.ndarray) -> bytes:
    encoded = io.BytesIO()
    Image.fromarray(pixels_HWC).save(encoded, "PNG")
    return encoded.getvalue()


def _text_encoder(name: str, dim: int, folder: Path) -> str:
    """A CLIP or T5 of one layer, as the name says, with the recipe's own channels; its tokenizer beside it."""
    torch.manual_seed(0)
    if "clip" in name:
        model: Any = CLIPTextModel(
            CLIPTextConfig(
                vocab_size=len(WORDS),
                hidden_size=dim,
                intermediate_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                bos_token_id=1,
                eos_token_id=2,
                pad_token_id=0,
            )
        )
    else:
        assert "t5" in name, f"write a small text encoder of {name}'s kind here"
        model = T5EncoderModel(T5Config(vocab_size=len(WORDS), d_model=dim, d_kv=8, d_ff=16, num_layers=1, num_heads=2))
    where = folder / name.replace("/", "-")
    model.save_pretrained(where)
    tokenizer(begins="clip" in name).save_pretrained(where)
    return str(where)


def _autoencoder(data: DataConfig, folder: Path) -> str:
    """An AutoencoderKL with the recipe's own downsampling, channels, scale and shift."""
    assert data.latents is not None
    torch.manual_seed(1)
    levels = data.latents.downsampling.bit_length()
    AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * levels,
        up_block_types=["UpDecoderBlock2D"] * levels,
        block_out_channels=[8] * levels,
        norm_num_groups=4,
        latent_channels=data.channels,
        scaling_factor=data.latents.scale,
        shift_factor=data.latents.shift,
    ).save_pretrained(folder)
    return str(folder)


def _embedder(embedder: EmbedderConfig, folder: Path) -> dict[str, Any]:
    """Fields of the same kind of embedder; a network of timm's with few channels, at two patches a side."""
    if embedder.kind in ("pixels", "lite0"):  # needs no file
        return {}
    assert embedder.kind == "timm", f"write a small embedder of kind {embedder.kind} here"
    with torch.device("meta"):
        patch = timm.create_model(embedder.model, num_classes=0).patch_embed.patch_size[0]
    torch.manual_seed(2)
    arguments = {**embedder.model_args, **SMALL_VIT}
    network = timm.create_model(embedder.model, num_classes=0, img_size=2 * patch, **arguments)
    folder.mkdir(exist_ok=True)
    save_file(network.state_dict(), folder / "vit.safetensors")
    return {
        "embedder.image_size": 2 * patch,
        "embedder.model_args": arguments,
        "embedder.checkpoint": str(folder / "vit.safetensors"),
    }
