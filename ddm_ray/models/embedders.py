"""Embedders: what turns images into the vectors that are clustered. Images are uint8 NHWC, grey (C = 1) or RGB.

N rows, B of them in a batch, C channels, H x W pixels, P = C*H*W values of an image, D dimensions of an embedding.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import faiss
import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load, save
from torch import Tensor

from ddm_ray.config import EmbedderConfig
from ddm_ray.errors import Begin, ConfigError, CorruptArtifact, DataError
from ddm_ray.models import third_party

OTHER_HALF = ("text_model.", "text_projection.", "logit_scale", "logit_bias")
"""Beginnings of the tensors that a model of images and texts has and its image model doesn't."""
IMAGE_MODELS = {
    "CLIPModel": ("CLIPVisionModelWithProjection", OTHER_HALF),
    "CLIPVisionModelWithProjection": ("CLIPVisionModelWithProjection", ()),
    "SiglipModel": ("SiglipVisionModel", OTHER_HALF),
}
"""By the class that was saved: the class that embeds images, where it isn't transformers' own choice."""
BLOCK_VALUES = 2**22
"""Most values of images (float64) that PixelEmbedder holds at once: 32 MiB."""


class Embedder(Protocol):
    """An embedder: pixels_NHWC uint8 -> embeddings_ND float32."""

    @property
    def dim(self) -> int: ...

    def __call__(self, pixels_NHWC: np.ndarray) -> np.ndarray: ...


def make_embedder(config: EmbedderConfig, pixel_embedder: "PixelEmbedder | None", device: str = "cpu") -> Embedder:
    """The embedder of a run; `pixel_embedder` is the fitted one if it embeds pixels.

    Raises DataError, ConfigError or CorruptArtifact if its network can't be loaded.
    """
    if config.kind == "timm":
        return TimmEmbedder(config, device)
    if config.kind == "transformers":
        return TransformersEmbedder(config, device)
    assert pixel_embedder is not None
    return pixel_embedder


@dataclass(frozen=True)
class PixelEmbedder:
    """The first D principal components of the pixels in [-1, 1]: mean_P and components_DP, float64."""

    mean_P: np.ndarray
    components_DP: np.ndarray

    @classmethod
    def fit(cls, pixels_NHWC: np.ndarray, dim: int) -> "PixelEmbedder":
        """Principal components of sample images, whose order matters to the last bits: sort them by id.

        Raises DataError if the images have fewer values than `dim`, or there are fewer images.
        """
        images_NP = _flat(pixels_NHWC)
        num_rows, num_values = images_NP.shape
        if dim > min(num_rows, num_values):
            raise DataError(
                f"embedder.dim {dim} is more than {num_rows} training images of {num_values} values allow",
                Begin(field="embedder.dim", value=f"{min(num_rows, num_values)}"),
            )
        pca = faiss.PCAMatrix(num_values, dim)
        pca.train(images_NP)
        components_DP = faiss.vector_to_array(pca.PCAMat).reshape(-1, num_values)[:dim]
        return cls(faiss.vector_to_array(pca.mean).astype(np.float64), components_DP.astype(np.float64))

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> "PixelEmbedder":
        """Read what `to_bytes` made. Raises CorruptArtifact naming `where` if it isn't whole."""
        try:
            tensors = load(data)
        except SafetensorError as error:
            raise CorruptArtifact(f"{where}: not whole safetensors ({third_party.brief(error)})") from None
        mean_P, components_DP = tensors.get("mean_P"), tensors.get("components_DP")
        if mean_P is None or components_DP is None or components_DP.shape[1:] != mean_P.shape:
            raise CorruptArtifact(f"{where}: not the principal components of pixels")
        return cls(mean_P, components_DP)

    def to_bytes(self) -> bytes:
        """A safetensors file; equal components give equal bytes."""
        return save({"mean_P": self.mean_P, "components_DP": np.ascontiguousarray(self.components_DP)})

    @property
    def dim(self) -> int:
        """D."""
        return len(self.components_DP)

    def __call__(self, pixels_NHWC: np.ndarray) -> np.ndarray:
        """embeddings_ND float32; a row's bits don't depend on the rows beside it."""
        embeddings_ND = np.empty((len(pixels_NHWC), self.dim), np.float32)
        for rows in _batches(len(pixels_NHWC), max(1, BLOCK_VALUES // len(self.mean_P))):
            centred_BP = _flat(pixels_NHWC[rows]) - self.mean_P
            # einsum sums each row in one fixed order; a matrix product's order depends on the batch.
            embeddings_ND[rows] = np.einsum("bp,dp->bd", centred_BP, self.components_DP)
        return embeddings_ND


class TimmEmbedder:
    """Pooled features of a timm network, e.g. DINOv2.

    Images are resized whole to the network's size and normalised as it was trained: they are cropped already.
    """

    def __init__(self, config: EmbedderConfig, device: str = "cpu"):
        """Load `config.checkpoint`, or timm's own weights. DataError if they are missing or don't fit."""
        import timm

        if config.checkpoint is not None and not Path(config.checkpoint).is_file():
            raise DataError(
                f"embedder.checkpoint {config.checkpoint}: no such file; put it there, or begin a run with another"
            )
        # As pretrained weights, a file is fitted to image size and classes as the network's own weights would be.
        own = {"file": config.checkpoint, "custom_load": False, "source": ""} if config.checkpoint else None
        self._batch_size, self._device = config.batch_size, device
        try:
            model = timm.create_model(
                config.model, pretrained=True, pretrained_cfg_overlay=own, num_classes=0, **config.model_args
            )
            self._model = model.eval().to(device)
            expects = timm.data.resolve_data_config(config.model_args, model=model)
            self._size: tuple[int, int] = tuple(expects["input_size"][1:])
            self._mode = "bilinear" if expects["interpolation"] == "bilinear" else "bicubic"
            self._mean_C11 = torch.tensor(expects["mean"], device=device)[:, None, None]
            self._std_C11 = torch.tensor(expects["std"], device=device)[:, None, None]
            self.dim = _probe(self)
        except Exception as error:  # timm passes on whatever its hub, readers and models raise
            mend = "begin a run whose embedder.model_args fit the file"
            if config.checkpoint is None:
                mend = "without a network, begin a run with embedder.checkpoint set to a file of its weights"
            raise DataError(
                f"embedder {config.model} with {config.checkpoint or 'pretrained weights'}:"
                f" {third_party.brief(error)}; {mend}"
            ) from error

    @torch.inference_mode()
    def __call__(self, pixels_NHWC: np.ndarray) -> np.ndarray:
        """embeddings_ND float32; grey images are taken as RGB."""
        return np.concatenate(
            [
                self._embed(torch.tensor(_rgb(pixels_NHWC[rows])))
                for rows in _batches(len(pixels_NHWC), self._batch_size)
            ]
        )

    def _embed(self, pixels_BHWC: Tensor) -> np.ndarray:
        images_BCHW = pixels_BHWC.to(self._device).permute(0, 3, 1, 2).float() / 255
        if images_BCHW.shape[2:] != self._size:
            images_BCHW = torch.nn.functional.interpolate(images_BCHW, self._size, mode=self._mode, antialias=True)
        embeddings: Tensor = self._model((images_BCHW.clamp(0, 1) - self._mean_C11) / self._std_C11)
        return embeddings.float().cpu().numpy()


class TransformersEmbedder:
    """Pooled features of an image model of transformers (DINOv2, ViT, CLIP, SigLIP), with its own preprocessing.

    The pooled vector is the model's, of CLIP the projected one; else the mean of its tokens.
    """

    def __init__(self, config: EmbedderConfig, device: str = "cpu"):
        """Load the folder or name of the hub `config.model`; a folder needs no network.

        ConfigError if it holds no image model, CorruptArtifact or TruncatedWeights if that isn't whole.
        """
        try:
            import transformers
        except ImportError:
            raise ConfigError(
                "embedder.kind transformers needs transformers: install it with: pip install 'ddm-ray[text]'"
            ) from None
        name, what = config.model, "embedder"
        third_party.require_config(name, what)
        about = third_party.load(transformers.AutoConfig, name, what)
        saved = (about.architectures or [""])[0]
        kind_name, ignored = IMAGE_MODELS.get(saved, (None, ()))
        kind: Any = getattr(transformers, kind_name) if kind_name else transformers.MODEL_MAPPING.get(type(about), None)
        if getattr(kind, "main_input_name", None) != "pixel_values":
            raise ConfigError(f"embedder {name}: is a {about.model_type}, no image model; begin a run with one")
        arguments: dict[str, Any] = {"dtype": torch.float32, **config.model_args}
        if saved.endswith("ForImageClassification"):
            # Its head is of no use here, and the pooling that a bare ViT has was never trained.
            ignored = ("classifier.", "head.")
            if saved.startswith("ViT"):
                arguments.setdefault("add_pooling_layer", False)
        self._model = third_party.load_model(kind, name, what, ignored, arguments).eval().to(device)
        self._processor = third_party.load(transformers.AutoImageProcessor, name, what)
        self._batch_size, self._device = config.batch_size, device
        try:
            self.dim = _probe(self)
        except Exception as error:  # a border: a folder may hold any model and processor
            raise DataError(f"embedder {name}: embeds no image ({third_party.brief(error)})") from error

    @torch.inference_mode()
    def __call__(self, pixels_NHWC: np.ndarray) -> np.ndarray:
        """embeddings_ND float32; grey images are taken as RGB."""
        return np.concatenate(
            [self._embed(_rgb(pixels_NHWC[rows])) for rows in _batches(len(pixels_NHWC), self._batch_size)]
        )

    def _embed(self, pixels_BHWC: np.ndarray) -> np.ndarray:
        inputs = self._processor(images=list(pixels_BHWC), return_tensors="pt", input_data_format="channels_last")
        outputs = self._model(pixel_values=inputs["pixel_values"].to(self._device, torch.float32))
        pooled: Tensor | None = getattr(outputs, "pooler_output", None)
        if pooled is None:
            pooled = getattr(outputs, "image_embeds", None)
        if pooled is None:
            pooled = outputs.last_hidden_state.mean(dim=1)
        # Convolutional networks keep two sides of one pixel.
        return pooled.flatten(1).float().cpu().numpy()


def _probe(embedder: Embedder) -> int:
    embeddings_ND = embedder(np.zeros((1, 32, 32, 3), np.uint8))
    if embeddings_ND.ndim != 2:
        raise ValueError(f"gives {embeddings_ND.ndim - 1} axes for an image, not one vector")
    return int(embeddings_ND.shape[1])


def _batches(num_rows: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, num_rows, size))


def _flat(pixels_NHWC: np.ndarray) -> np.ndarray:
    """images_NP float32 in [-1, 1], in the order C, H, W."""
    images_NP = pixels_NHWC.transpose(0, 3, 1, 2).reshape(len(pixels_NHWC), -1).astype(np.float32)
    images_NP /= np.float32(127.5)
    images_NP -= np.float32(1)
    return images_NP


def _rgb(pixels_BHWC: np.ndarray) -> np.ndarray:
    return pixels_BHWC if pixels_BHWC.shape[3] == 3 else pixels_BHWC.repeat(3, axis=3)
