"""A finished run of texts and latents whose models were never trained, with an encoder and an autoencoder to open."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from ddm_ray.models import weights
from ddm_ray.models.spec import router_spec, spec_of
from ddm_ray.run.graph import ROUTER
from ddm_ray.run.run import Run
from tests.random_run import make_texts, publish
from tests.sampling import tiny_components


def make_text_run(folder: Path, settings: tuple[str, ...] = ()) -> Run:
    """Two experts and a router of random weights on 4 x 4 latents of four channels; images have 8 x 8 pixels."""
    encoder, autoencoder = folder / "encoder", folder / "autoencoder"
    tiny_components.tokenizer(encoder).save_pretrained(encoder)
    tiny_components.text_model().save_pretrained(encoder)
    tiny_components.autoencoder().save_pretrained(autoencoder)
    dim, tokens = tiny_components.TEXT_DIM, tiny_components.TOKENS
    run = make_texts(
        str(folder / "run"),
        (
            f"data.text={{encoder: {encoder}, tokens: {tokens}, dim: {dim}, pooled_dim: {dim}}}",
            f"data.latents={{autoencoder: {autoencoder}, downsampling: 2, scale: 0.5}}",
            "sample={steps: 6}",
            *settings,
        ),
    )
    for number, artifact in enumerate(run.experts):
        publish(run, artifact, made(spec_of(run.config, "expert", artifact.cluster), number), 3, 4)
    publish(run, ROUTER, made(router_spec(run.config), 9), 3, 8)
    return run


def made(spec: dict[str, Any], seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = weights.build(spec)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model
