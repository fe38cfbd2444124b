"""Phases of gpu.py about sampling and preparing: mixtures beside one dense network; embedding, encoding, decoding."""

import copy
import io
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gpu_measure import PEAK, TINY, XL, median_ms, waits
from PIL import Image
from torch import nn

from ddm_ray.config import EmbedderConfig, SamplingSettings
from ddm_ray.data.images import decode as decode_image
from ddm_ray.models import weights
from ddm_ray.models.embedders import make_embedder
from ddm_ray.models.flops import forward_flops_per_row, weights_bytes
from ddm_ray.models.router import Router
from ddm_ray.sampling.offload import OffloadedToHost
from ddm_ray.sampling.request import MixtureInfo, SampleRequest
from ddm_ray.sampling.run_models import Models

if TYPE_CHECKING:
    from gpu import Asked

K, OFFLOADED, STEPS = 8, 4, (4, 20)
"""Experts, those of mixtures that are offloaded, and the numbers of steps whose difference is told: what an image costs
once counts in neither."""
PAID = {"once": 1, "top-1": 1, "top-2": 2, "full": K}
"""Experts that a step of each strategy asks for a row."""
EMBEDDER, TINY_EMBEDDER = "vit_large_patch14_dinov2.lvd142m", "vit_tiny_patch16_224"


def sampling(asked: "Asked") -> None:
    """A step of mixtures of eight, in bf16 and fp32, beside that of one dense network on the same rows."""
    size = TINY if asked.tiny else XL
    small = size if asked.tiny else size | {"width": 192, "depth": 12, "heads": 3}
    router = Router(num_experts=K, **small).eval().to(asked.device)
    nn.init.normal_(router.head.weight, std=2.0)
    experts = []
    for _ in range(K):
        network = weights.build({"class": "DiT", "config": size}, asked.device)
        for parameter in network.parameters():
            nn.init.normal_(parameter, std=0.02)
        experts.append(network.eval().to(torch.bfloat16))
    for dtype in (torch.bfloat16, torch.float32):
        same = tuple(network.to(dtype) for network in experts)
        models = _mixture(same, router.to(dtype), size, asked.device)
        for images in (2,) if asked.tiny else (1, 8, 64):
            _one_size(asked, models, images, size)


def _mixture(experts: tuple[nn.Module, ...], router: nn.Module | None, size: dict[str, Any], device: str) -> Models:
    shape = (size["channels"], size["image_size"], size["image_size"])
    count = len(experts)
    prior_CK = torch.full((size["num_classes"] + 1, count), 1 / count, dtype=torch.float64)
    return Models(MixtureInfo(count, shape, size["num_classes"], prior_CK), experts, router, device)


def _one_size(asked: "Asked", models: Models, images: int, size: dict[str, Any]) -> None:
    dtype, device = models.dtype, asked.device
    of = f"{str(dtype).removeprefix('torch.')}, {images} images"
    network = models.experts[0]
    assert isinstance(network, nn.Module)
    rows = 2 * images  # guidance asks twice
    x_BCHW = torch.randn(rows, *models.info.image_shape, device=device, dtype=dtype)
    t_B, label_B = torch.rand(rows, device=device), torch.zeros(rows, dtype=torch.int64, device=device)
    with torch.inference_mode():
        dense = median_ms(lambda: network(x_BCHW, t_B, label_B), device, 5)
    asked.tell(f"{of}: a dense step", dense, "ms")
    if dtype == torch.bfloat16:
        flops = rows * forward_flops_per_row(network, models.info.image_shape)
        asked.tell(f"{of}: MFU of a dense step", 100 * flops / (dense / 1e3) / PEAK, "%")
    for strategy, paid in PAID.items():
        if dtype == torch.float32 and images > 8 and strategy != "once":
            continue  # minutes, for what fewer images tell
        few, many = (_request(images, size, strategy, steps) for steps in STEPS)

        def mixed(
            name: str = f"{of}, {strategy}", few: SampleRequest = few, many: SampleRequest = many, paid: int = paid
        ) -> None:
            both = [median_ms(partial(models.sample, request), device, 3, 1) for request in (few, many)]
            ms = (both[1] - both[0]) / (STEPS[1] - STEPS[0])
            asked.tell(f"{name}: a step", ms, "ms")
            asked.tell(f"{name}: what an image costs once", both[0] - STEPS[0] * ms, "ms")
            fast = dtype == torch.bfloat16 and paid == 1 and not asked.tiny
            asked.tell(f"{name}: speed over {paid} dense", paid * dense / ms, "", ">= 0.95" if fast else "")
            if device == "cuda":
                with waits(device) as places:
                    models.sample(many)
                asked.tell(f"{name}: waits of a step", places.total() / STEPS[1])

        asked.tried(f"{of}, {strategy}", mixed)


def _request(images: int, size: dict[str, Any], strategy: str, steps: int) -> SampleRequest:
    settings = {"steps": steps, "guidance_scale": 3.0, "strategy": strategy, "solver": "euler"}
    labels = torch.arange(images) % size["num_classes"]
    return SampleRequest(tuple(range(images)), labels, SamplingSettings.model_validate(settings))


def offload(asked: "Asked") -> None:
    """Mixtures of which two experts are on the device at a time, beside those with all of them there."""
    size, images = (TINY, 4) if asked.tiny else (XL, 64)
    dtype = torch.bfloat16
    experts = []
    for _ in range(OFFLOADED):
        network = weights.build({"class": "DiT", "config": size}, asked.device)
        for parameter in network.parameters():
            nn.init.normal_(parameter, std=0.02)
        experts.append(network.eval().to(dtype))
    router = Router(num_experts=OFFLOADED, **TINY).eval().to(asked.device, dtype) if asked.tiny else None
    resident = _mixture(tuple(experts), router, size, asked.device)
    began = time.perf_counter()
    moved = OffloadedToHost(lambda number: copy.deepcopy(experts[number]).cpu(), [True] * OFFLOADED, asked.device)
    moved.dtype = dtype
    asked.tell("pinning them", time.perf_counter() - began, "s")
    seconds: list[float] = []
    moved.on_fetch = lambda _, took, waited: seconds.append(took)
    offloaded = Models(resident.info, moved, router, asked.device)
    request = _request(images, size, "once" if router is None else "top-1", STEPS[1])
    each = [median_ms(partial(models.sample, request), asked.device, 3, 1) for models in (resident, offloaded)]
    asked.tell("two on the device, over all on it", each[1] / each[0], "times", "" if asked.tiny else "<= 1.3")
    moved.measure()
    if seconds:
        each_bytes = weights_bytes(experts[0], dtype)
        asked.tell("fetching one", 1e3 * statistics.median(seconds), "ms")
        asked.tell("by the bus", each_bytes / statistics.median(seconds) / 1e9, "GB/s")


def embed(asked: "Asked") -> None:
    """Images a second of DINOv2-L as evaluate and as prepare call it, of an autoencoder, and of both."""
    rows = 4 if asked.tiny else 1024
    pixels = np.random.default_rng(0).integers(0, 255, (rows, 256, 256, 3), np.uint8)
    with tempfile.TemporaryDirectory() as folder:
        name, side, file = saved_embedder(asked, Path(folder))
        config = EmbedderConfig.model_validate(
            {"kind": "timm", "model": name, "checkpoint": str(file), "image_size": side, "batch_size": 64}
        )
        right_ND = torch.as_tensor(make_embedder(config, None, "cpu", exact=True)(pixels[:4]))
        for exact in (True, False):
            embedder = make_embedder(config, None, asked.device, exact=exact)
            speed = 1e3 * rows / median_ms(lambda e=embedder: e(pixels), asked.device, 3, 1)  # type: ignore[misc]
            target = "" if exact or asked.tiny else ">= 2440"
            asked.tell(f"{name}, {'exact' if exact else 'as prepare has it'}", speed, "images/s", target)
            alike_N = torch.cosine_similarity(torch.as_tensor(embedder(pixels[:4])).double(), right_ND.double())
            asked.tell("its cosine with a CPU's, at least", float(alike_N.min()), "", ">= 0.99")
    asked.tried("autoencoder", lambda: _autoencoder(asked, embedder, pixels))


def saved_embedder(asked: "Asked", folder: Path) -> tuple[str, int, Path]:
    """An embedder by its timm name, the side of its images, and a file of random weights for it."""
    import timm
    from safetensors.torch import save_file

    name, side = (TINY_EMBEDDER, 32) if asked.tiny else (EMBEDDER, 224)
    file = folder / "embedder.safetensors"
    save_file(timm.create_model(name, num_classes=0, img_size=side).state_dict(), file)
    return name, side, file


def _autoencoder(asked: "Asked", embedder: Callable[[np.ndarray], Any], pixels: np.ndarray) -> None:
    from diffusers import AutoencoderKL

    from ddm_ray.core.transfer import frozen_dtype
    from ddm_ray.models.latents import Latents

    widths = (32, 64) if asked.tiny else (128, 256, 512, 512)
    blocks = {
        "down_block_types": ["DownEncoderBlock2D"] * len(widths),
        "up_block_types": ["UpDecoderBlock2D"] * len(widths),
    }
    model = AutoencoderKL(**blocks, block_out_channels=widths, layers_per_block=2, latent_channels=4)
    dtype = frozen_dtype(asked.device)
    latents = Latents(model, 1.0).to(asked.device, dtype)
    count, side = (2, 32) if asked.tiny else (64, 256)
    images = torch.randn(count, 3, side, side, device=asked.device, dtype=dtype)
    speed = 1e3 * len(images) / median_ms(lambda: latents.encode(images), asked.device, 3, 1)
    asked.tell(f"autoencoder encodes {side} x {side}", speed, "images/s")
    both = median_ms(lambda: (embedder(pixels[:count]), latents.encode(images)), asked.device, 3, 1)
    asked.tell("embedding and encoding", 1e3 * count / both, "images/s", "" if asked.tiny else ">= 850")


def decode(asked: "Asked") -> None:
    """Images a second that all processors decode: what a GPU can be fed."""
    count = os.cpu_count() or 1
    with ProcessPoolExecutor(count) as pool:
        each = list(pool.map(_decoded, [0.5 if asked.tiny else 5.0] * count))
    asked.tell(f"{count} processors decode 500 x 375 to 256", sum(each), "images/s", "" if asked.tiny else ">= 2440")


def _decoded(seconds: float) -> float:
    """Photographs that this process decodes a second."""
    photograph = jpeg(0)
    began, done = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        decode_image(photograph, (3, 256, 256))
        done += 1
    return done / (time.perf_counter() - began)


def jpeg(seed: int) -> bytes:
    """A photograph's file of 500 x 375 pixels, of smooth noise."""
    noise = np.random.default_rng(seed).integers(0, 255, (24, 32, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).resize((500, 375), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()
