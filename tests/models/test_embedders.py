"""Embedders: principal components of pixels; networks of timm and transformers, of random weights, from files."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import transformers as tf
from PIL import Image
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits

from ddm_ray.config import EmbedderConfig
from ddm_ray.errors import ConfigError, CorruptArtifact, DataError
from ddm_ray.models.embedder_networks import TimmEmbedder, TransformersEmbedder
from ddm_ray.models.embedders import PixelEmbedder, make_embedder
from tests.pretend_streams import pretended
from tests.small_vit import MODEL, SMALL, write_small_vit

VISION = {
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
}
WORDS = {**{key: VISION[key] for key in list(VISION)[:4]}, "vocab_size": 12, "max_position_embeddings": 8}


@pytest.fixture
def networks_of_meta() -> Iterator[None]:
    """Has torch move networks to meta, which it refuses else."""
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    yield
    torch.__future__.set_overwrite_module_params_on_conversion(False)


@pytest.fixture(scope="module")
def digits_NHWC() -> np.ndarray:
    return (load_digits().images[..., None] * 15.9375).astype(np.uint8)


@pytest.fixture(scope="module")
def photos_NHWC() -> np.ndarray:
    """Smooth colours, 40 x 40: as of photographs, little is lost when they are resized."""
    coarse = np.random.default_rng(0).integers(0, 256, (5, 5, 5, 3), np.uint8)
    return np.stack([np.asarray(Image.fromarray(image).resize((40, 40), Image.Resampling.BICUBIC)) for image in coarse])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("timm") / "vit.safetensors"
    return str(write_small_vit(path)["checkpoint"])


def config(checkpoint: str | None, **changes) -> EmbedderConfig:
    return EmbedderConfig(**{"kind": "timm", "model": MODEL, "checkpoint": checkpoint, "model_args": SMALL, **changes})


def saved(folder: Path, model: tf.PreTrainedModel, processor: tf.BaseImageProcessor) -> EmbedderConfig:
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return EmbedderConfig(kind="transformers", model=str(folder), batch_size=2)


def test_components_are_the_principal_ones(digits_NHWC: np.ndarray) -> None:
    embedder = PixelEmbedder.fit(digits_NHWC, 10)
    pixels = digits_NHWC.reshape(-1, 64) / 127.5 - 1
    left, scale, _ = np.linalg.svd(pixels - pixels.mean(0), full_matrices=False)
    expected = np.abs(left[:, :10] * scale[:10])
    assert embedder.dim == 10
    np.testing.assert_allclose(np.abs(embedder(digits_NHWC)), expected, atol=2e-3)


@pytest.mark.parametrize("block_values", [2**22, 64 * 100])
def test_an_embedding_does_not_depend_on_its_batch(
    digits_NHWC: np.ndarray, block_values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedder = PixelEmbedder.fit(digits_NHWC, 16)
    together = embedder(digits_NHWC)
    monkeypatch.setattr("ddm_ray.models.embedders.BLOCK_VALUES", block_values)
    for size in (1, 7, 256):
        parts = [embedder(digits_NHWC[start : start + size]) for start in range(0, 600, size)]
        assert np.array_equal(np.concatenate(parts)[:600], together[:600])


def test_components_are_saved_and_read_whole(digits_NHWC: np.ndarray, checkpoint: str) -> None:
    embedder = PixelEmbedder.fit(digits_NHWC, 8)
    data = embedder.to_bytes()
    again = make_embedder(EmbedderConfig(), PixelEmbedder.from_bytes(data, "here"))
    assert np.array_equal(again(digits_NHWC), embedder(digits_NHWC))
    assert isinstance(again, PixelEmbedder)
    assert again.mean_P.dtype == again.components_DP.dtype == np.float64
    for damaged in (b"", data[:-1], data[:20]):
        with pytest.raises(CorruptArtifact, match=r"^here: not whole safetensors"):
            PixelEmbedder.from_bytes(damaged, "here")
    with pytest.raises(CorruptArtifact, match=r"^here: not the principal components of pixels$"):
        PixelEmbedder.from_bytes(PixelEmbedder(embedder.mean_P[:9], embedder.components_DP).to_bytes(), "here")


@pytest.mark.parametrize("size", [14, 42])
def test_a_size_of_its_own_is_what_images_are_resized_to(
    checkpoint: str, photos_NHWC: np.ndarray, size: int, tmp_path: Path
) -> None:
    """Of a transformer, whose positions are fitted to it, and of a convolutional network, which takes any."""
    transformer = {**SMALL, "img_size": size}
    by_arguments = TimmEmbedder(config(checkpoint, model_args=transformer))(photos_NHWC)
    assert np.array_equal(TimmEmbedder(config(checkpoint, image_size=size))(photos_NHWC), by_arguments)
    assert not np.allclose(TimmEmbedder(config(checkpoint))(photos_NHWC), by_arguments, rtol=1e-3)

    net = timm.create_model("test_resnet", num_classes=0).eval()
    save_file(net.state_dict(), tmp_path / "net.safetensors")
    convolutions = EmbedderConfig(
        kind="timm", model="test_resnet", checkpoint=str(tmp_path / "net.safetensors"), image_size=size
    )
    images_NCHW = torch.from_numpy(photos_NHWC).permute(0, 3, 1, 2).float() / 255
    mode = net.pretrained_cfg["interpolation"]
    small_NCHW = torch.nn.functional.interpolate(images_NCHW, (size, size), mode=mode, antialias=True).clamp(0, 1)
    mean_C11, std_C11 = (torch.tensor(net.pretrained_cfg[name])[:, None, None] for name in ("mean", "std"))
    with torch.inference_mode():
        expected = net((small_NCHW - mean_C11) / std_C11).numpy()
    np.testing.assert_allclose(TimmEmbedder(convolutions)(photos_NHWC), expected, rtol=1e-4, atol=1e-5)


def test_timms_own_name_for_the_size_means_the_same() -> None:
    """Runs were begun with it, and are to be found unchanged."""
    named = EmbedderConfig(kind="timm", model_args={"img_size": 224, "depth": 2})
    assert named == EmbedderConfig(kind="timm", image_size=224, model_args={"depth": 2})
    assert EmbedderConfig.model_validate_json(named.model_dump_json()) == named


def test_a_size_is_refused_where_the_network_has_its_own() -> None:
    with pytest.raises(ValueError, match="image_size is for kind timm or lite0; pixels has a size of its own"):
        EmbedderConfig(image_size=28)


@pytest.mark.parametrize(("num_rows", "dim", "most"), [(20, 21, 20), (200, 65, 64)])
def test_more_components_than_the_data_allow(digits_NHWC: np.ndarray, num_rows: int, dim: int, most: int) -> None:
    with pytest.raises(DataError, match=f"embedder.dim {dim} .* begin a run with embedder.dim={most}$"):
        PixelEmbedder.fit(digits_NHWC[:num_rows], dim)
    assert PixelEmbedder.fit(digits_NHWC[:num_rows], most).dim == most


def test_timm_features_are_the_networks_own(checkpoint: str, photos_NHWC: np.ndarray) -> None:
    model = timm.create_model(MODEL, num_classes=0, **SMALL).eval()
    model.load_state_dict(load_file(checkpoint))
    expects = timm.data.resolve_data_config(SMALL, model=model)
    assert expects["input_size"] == (3, 28, 28)
    transform = timm.data.create_transform(**expects)
    with torch.inference_mode():
        expected = model(torch.stack([transform(Image.fromarray(image)) for image in photos_NHWC])).numpy()
    embedder = make_embedder(config(checkpoint, batch_size=2), None)
    assert isinstance(embedder, TimmEmbedder)
    assert embedder.dim == 32
    # PIL rounds the resized image to whole numbers; bilinear resizing would be 0.0106 away.
    np.testing.assert_allclose(embedder(photos_NHWC), expected, atol=0.009)
    own_size_NHWC = photos_NHWC[:, :28, :28]
    with torch.inference_mode():
        expected = model(torch.stack([transform(Image.fromarray(image)) for image in own_size_NHWC])).numpy()
    np.testing.assert_allclose(embedder(own_size_NHWC), expected, atol=1e-5)


@pytest.mark.parametrize("exact", [False, True])
def test_on_a_gpu_it_is_fed_without_waiting_in_bf16(
    checkpoint: str, photos_NHWC: np.ndarray, exact: bool, networks_of_meta: None
) -> None:
    """The host waits once for all batches; where a distance is taken, precision is a CPU's."""
    plain = make_embedder(config(checkpoint), None)
    with pretended() as gpu:
        embedder = make_embedder(config(checkpoint, batch_size=1), None, "meta", exact=exact)
        gpu.waits.clear()
        embeddings = embedder(photos_NHWC)
        assert gpu.waits.total() == 1 and len(photos_NHWC) > 1, gpu.waits
    assert embedder.fingerprint == plain.fingerprint
    error = np.linalg.norm(embeddings - plain(photos_NHWC)) / np.linalg.norm(embeddings)
    assert error < 1e-5 if exact else 1e-5 < error < 1e-2


def test_small_grey_images_are_seen_as_rgb(digits_NHWC: np.ndarray, checkpoint: str) -> None:
    embedder = TimmEmbedder(config(checkpoint))
    embeddings = embedder(digits_NHWC[:50])
    np.testing.assert_allclose(embedder(digits_NHWC[:50].repeat(3, axis=3)), embeddings, atol=1e-5)
    assert embeddings.shape == (50, 32)
    assert embeddings.dtype == np.float32
    assert np.isfinite(embeddings).all()
    assert embeddings.std(0).min() > 0


@pytest.mark.parametrize("damage", ["missing", "cut", "other shape", "unknown model", "unknown argument"])
def test_a_network_that_cannot_be_loaded_says_so_in_one_line(checkpoint: str, tmp_path: Path, damage: str) -> None:
    path = tmp_path / "vit.safetensors"
    changes = {
        "other shape": {"model_args": {**SMALL, "depth": 3}},
        "unknown model": {"model": "no_such_net"},
        "unknown argument": {"model_args": {"no_such": 1}},
    }.get(damage, {})
    if damage == "cut":
        path.write_bytes(Path(checkpoint).read_bytes()[:5000])
    if changes:
        path = Path(checkpoint)
    with pytest.raises(DataError) as error:
        TimmEmbedder(config(str(path), **changes))
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_dinov2_of_transformers(tmp_path: Path, photos_NHWC: np.ndarray, digits_NHWC: np.ndarray) -> None:
    torch.manual_seed(0)
    model = tf.Dinov2Model(tf.Dinov2Config(**VISION)).eval()
    processor = tf.BitImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 28, "width": 28})
    embedder = make_embedder(saved(tmp_path, model, processor), None)
    assert isinstance(embedder, TransformersEmbedder)
    images = [Image.fromarray(image) for image in photos_NHWC]
    with torch.inference_mode():
        expected = model(**processor(images=images, return_tensors="pt")).pooler_output.numpy()
    embeddings = embedder(photos_NHWC)
    assert (embedder.dim, embeddings.dtype) == (24, np.float32)
    np.testing.assert_allclose(embeddings, expected, atol=1e-4)
    np.testing.assert_allclose(np.concatenate([embedder(image[None]) for image in photos_NHWC]), embeddings, atol=1e-5)
    np.testing.assert_allclose(embedder(digits_NHWC[:3]), embedder(digits_NHWC[:3].repeat(3, axis=3)), atol=1e-6)


@pytest.mark.parametrize("kind", ["whole", "projected", "vision"])
def test_clip_of_transformers(tmp_path: Path, photos_NHWC: np.ndarray, kind: str) -> None:
    torch.manual_seed(0)
    clip = tf.CLIPModel(
        tf.CLIPConfig(text_config=WORDS, vision_config={**VISION, "projection_dim": 16}, projection_dim=16)
    ).eval()
    projected = tf.CLIPVisionModelWithProjection(clip.config.vision_config).eval()
    projected.vision_model.load_state_dict(clip.vision_model.state_dict())
    projected.visual_projection.load_state_dict(clip.visual_projection.state_dict())
    vision = tf.CLIPVisionModel(clip.config.vision_config).eval()
    model = {"whole": clip, "projected": projected, "vision": vision}[kind]
    processor = tf.CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    embedder = TransformersEmbedder(saved(tmp_path, model, processor))
    pixels = processor(images=[Image.fromarray(image) for image in photos_NHWC], return_tensors="pt")
    with torch.inference_mode():
        expected = vision(**pixels).pooler_output if kind == "vision" else projected(**pixels).image_embeds
    assert embedder.dim == (24 if kind == "vision" else 16)
    np.testing.assert_allclose(embedder(photos_NHWC), expected.numpy(), atol=1e-4)


def test_siglip_of_transformers(tmp_path: Path, photos_NHWC: np.ndarray) -> None:
    torch.manual_seed(0)
    siglip = tf.SiglipModel(tf.SiglipConfig(text_config=WORDS, vision_config=VISION)).eval()
    processor = tf.SiglipImageProcessor(size={"height": 28, "width": 28})
    embedder = TransformersEmbedder(saved(tmp_path, siglip, processor))
    pixels = processor(images=[Image.fromarray(image) for image in photos_NHWC], return_tensors="pt")
    with torch.inference_mode():
        expected = siglip.vision_model(**pixels).pooler_output.numpy()
    np.testing.assert_allclose(embedder(photos_NHWC), expected, atol=1e-4)


def test_a_classifiers_head_and_untrained_pooling_are_left_out(tmp_path: Path, photos_NHWC: np.ndarray) -> None:
    torch.manual_seed(0)
    model = tf.ViTForImageClassification(tf.ViTConfig(**VISION)).eval()
    processor = tf.ViTImageProcessor(size={"height": 28, "width": 28})
    embedder = TransformersEmbedder(saved(tmp_path, model, processor))
    pixels = processor(images=[Image.fromarray(image) for image in photos_NHWC], return_tensors="pt")
    with torch.inference_mode():
        expected = model.vit(**pixels).last_hidden_state.mean(1).numpy()
    np.testing.assert_allclose(embedder(photos_NHWC), expected, atol=1e-4)


def test_a_folder_without_an_image_model_is_refused(tmp_path: Path) -> None:
    model = tf.Dinov2Model(tf.Dinov2Config(**VISION))
    good = saved(tmp_path, model, tf.BitImageProcessor())
    file = tmp_path / "model.safetensors"
    data = file.read_bytes()

    def refused(kind: type[Exception], message: str) -> None:
        with pytest.raises(kind, match=f"^[^\n]*{message}[^\n]*$") as failure:
            TransformersEmbedder(good)
        assert str(tmp_path) in str(failure.value)

    file.write_bytes(data[:-5])
    refused(CorruptArtifact, "not whole safetensors")
    file.write_bytes(data)
    (tmp_path / "preprocessor_config.json").unlink()
    refused(CorruptArtifact, "can't be loaded")
    tf.BitImageProcessor(do_resize=False, crop_size={"height": 5, "width": 5}).save_pretrained(tmp_path)
    refused(DataError, "embeds no image")
    tf.BertModel(tf.BertConfig(**WORDS)).save_pretrained(tmp_path)
    refused(ConfigError, "is a bert, no image model of those known; begin a run with one")
    (tmp_path / "config.json").unlink()
    refused(ConfigError, "has no config.json")
