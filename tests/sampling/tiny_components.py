"""Tiny random mixtures with all that belongs to them: real classes of transformers and diffusers, no download.

Shapes: K experts, C conditions.
"""

import json
import string
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from ddm_ray.core.flow import Flow
from ddm_ray.models.dit import DiT
from ddm_ray.models.latents import Latents
from ddm_ray.models.router import Router
from ddm_ray.models.text import TextEncoder
from ddm_ray.pipeline import DDMPipeline
from ddm_ray.sampling.request import MixtureInfo
from ddm_ray.sampling.run_models import Models, matched

TEXT_DIM, TOKENS = 12, 9
NUM_EXPERTS, NUM_CLASSES = 4, 3


def tokenizer(folder: Path) -> Any:
    """CLIP's, knowing single letters only, written to and read from `folder`."""
    letters = [letter + end for letter in string.ascii_lowercase for end in ("", "</w>")]
    vocabulary = {token: number for number, token in enumerate([*letters, "<|startoftext|>", "<|endoftext|>"])}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=TOKENS)


def text_model(seed: int = 0) -> CLIPTextModel:
    torch.manual_seed(seed)
    config = CLIPTextConfig(
        vocab_size=54,
        hidden_size=TEXT_DIM,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=TOKENS,
        bos_token_id=52,
        eos_token_id=53,
        pad_token_id=53,
    )
    return CLIPTextModel(config).eval()


def text_encoder(folder: Path, seed: int = 0) -> TextEncoder:
    return TextEncoder(tokenizer(folder), text_model(seed), None)


def autoencoder() -> AutoencoderKL:
    """Four latent channels, two pixels a latent along each side."""
    torch.manual_seed(1)
    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
    return AutoencoderKL(
        **blocks, block_out_channels=[8, 8], norm_num_groups=4, latent_channels=4, scaling_factor=0.5
    ).eval()


def latents() -> Latents:
    return Latents(autoencoder(), 0.5)


def random(build: Callable[..., nn.Module], seed: int, **arguments: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build(**arguments)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def models(condition: str = "classes", flows: tuple[Flow, ...] = (Flow(),), router_path: str = "linear") -> Models:
    """NUM_EXPERTS experts, of these flows in turn, of a mixture conditioned on classes, texts or nothing."""
    num_classes = {"classes": NUM_CLASSES, "texts": None, "nothing": 0}[condition]
    sizes = {
        "image_size": 8,
        "channels": 4 if condition == "texts" else 1,
        "num_classes": num_classes or None,
        "text_dim": TEXT_DIM if condition == "texts" else None,
        "patch_size": 4,
        "width": 16,
        "depth": 1,
        "heads": 2,
    }
    experts = [
        matched(random(DiT, k, **sizes, adaln="single" if k % 2 else "zero"), flows[k % len(flows)])
        for k in range(NUM_EXPERTS)
    ]
    router = matched(random(Router, 99, num_experts=NUM_EXPERTS, **sizes), Flow(router_path))
    generator = torch.Generator().manual_seed(0)
    prior_CK = torch.rand((num_classes or 0) + 1, NUM_EXPERTS, generator=generator, dtype=torch.float64)
    info = MixtureInfo(NUM_EXPERTS, (sizes["channels"], 8, 8), num_classes, prior_CK / prior_CK.sum(1, keepdim=True))
    return Models(info, tuple(experts), router)


def classes(**changes: Any) -> DDMPipeline:
    return DDMPipeline(models(**changes), class_names=("cat", "dog", "owl"))


def texts(folder: Path) -> DDMPipeline:
    encoder = text_encoder(folder)
    text_models = models("texts")
    text_models = replace(text_models, info=replace(text_models.info, null_text=encoder.null()))
    return DDMPipeline(text_models, text_encoder=encoder, latents=latents())
