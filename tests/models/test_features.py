from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from sklearn.datasets import load_digits

from ddm_ray.config import EmbedderConfig
from ddm_ray.errors import DataError
from ddm_ray.models.features import PixelFeatures, TimmFeatures

MODEL = "vit_small_patch14_dinov2"
SMALL = {"embed_dim": 32, "depth": 2, "num_heads": 2, "img_size": 28}


@pytest.fixture(scope="module")
def digits_NCHW() -> np.ndarray:
    return (load_digits().images[:, None] / 8 - 1).astype(np.float32)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("timm") / "vit.pt"
    torch.save(timm.create_model(MODEL, num_classes=0, **SMALL).state_dict(), path)
    return str(path)


def config(checkpoint: str | None, **changes) -> EmbedderConfig:
    return EmbedderConfig(**{"kind": "timm", "model": MODEL, "checkpoint": checkpoint, "model_args": SMALL, **changes})


def test_components_are_the_principal_ones(digits_NCHW):
    features = PixelFeatures.fit(digits_NCHW, 10)
    pixels = digits_NCHW.reshape(-1, 64).astype(np.float64)
    left, scale, _ = np.linalg.svd(pixels - pixels.mean(0), full_matrices=False)
    expected = np.abs(left[:, :10] * scale[:10])
    assert features.dim == 10
    np.testing.assert_allclose(np.abs(features(digits_NCHW)), expected, atol=2e-3)


def test_an_embedding_does_not_depend_on_its_batch(digits_NCHW):
    features = PixelFeatures.fit(digits_NCHW, 16)
    whole = features(digits_NCHW)
    for size in (1, 7, 256):
        parts = [features(digits_NCHW[start : start + size]) for start in range(0, 600, size)]
        assert np.array_equal(np.concatenate(parts)[:600], whole[:600])


def test_the_same_images_give_the_same_components(digits_NCHW):
    first, second = PixelFeatures.fit(digits_NCHW, 8), PixelFeatures.fit(digits_NCHW.copy(), 8)
    assert np.array_equal(first.components_DP, second.components_DP)
    assert np.array_equal(first.mean_P, second.mean_P)


@pytest.mark.parametrize(("num_rows", "dim", "most"), [(20, 21, 20), (200, 65, 64)])
def test_more_components_than_the_data_allow(digits_NCHW, num_rows, dim, most):
    with pytest.raises(DataError, match=f"embedder.dim {dim} .* set it to at most {most}$"):
        PixelFeatures.fit(digits_NCHW[:num_rows], dim)
    assert PixelFeatures.fit(digits_NCHW[:num_rows], most).dim == most


def test_timm_features_are_the_networks_own(checkpoint):
    images = np.random.default_rng(0).uniform(-1, 1, (3, 3, 28, 28)).astype(np.float32)
    model = timm.create_model(MODEL, num_classes=0, **SMALL).eval()
    model.load_state_dict(torch.load(checkpoint, weights_only=True))
    mean, std = (torch.tensor(model.pretrained_cfg[key])[:, None, None] for key in ("mean", "std"))
    with torch.inference_mode():
        expected = model((torch.from_numpy(images) / 2 + 0.5 - mean) / std).numpy()
    features = TimmFeatures(config(checkpoint))
    assert features.dim == 32
    np.testing.assert_allclose(features(images), expected, atol=1e-5)


def test_small_grey_images_are_seen_as_rgb(digits_NCHW, checkpoint):
    features = TimmFeatures(config(checkpoint))
    embeddings = features(digits_NCHW[:50])
    np.testing.assert_allclose(features(digits_NCHW[:50].repeat(3, axis=1)), embeddings, atol=1e-5)
    assert embeddings.shape == (50, 32)
    assert embeddings.dtype == np.float32
    assert np.isfinite(embeddings).all()
    assert embeddings.std(0).min() > 0


@pytest.mark.parametrize("damage", ["missing", "cut", "other shape", "unknown model"])
def test_a_network_that_cannot_be_loaded_says_so_in_one_line(checkpoint, tmp_path, damage):
    changes, path = {}, tmp_path / "vit.pt"
    if damage == "cut":
        path.write_bytes(Path(checkpoint).read_bytes()[:5000])
    if damage in ("other shape", "unknown model"):
        path = checkpoint
        changes = {"model": "no_such_net"} if damage == "unknown model" else {"model_args": {**SMALL, "depth": 3}}
    with pytest.raises(DataError) as error:
        TimmFeatures(config(str(path), **changes))
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)
