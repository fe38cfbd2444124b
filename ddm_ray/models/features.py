"""Embedders: what turns images into the vectors that are clustered. Images are float32 NCHW in [-1, 1].

N rows, C channels, H x W pixels, P = C*H*W values of an image, D dimensions of an embedding.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import faiss
import numpy as np

from ddm_ray.config import EmbedderConfig
from ddm_ray.errors import DataError


class Features(Protocol):
    """An embedder: images_NCHW float32 in [-1, 1] -> embeddings_ND float32."""

    @property
    def dim(self) -> int: ...

    def __call__(self, images_NCHW: np.ndarray) -> np.ndarray: ...


@dataclass(frozen=True)
class PixelFeatures:
    """The first D principal components of the pixels: mean_P and components_DP, float64."""

    mean_P: np.ndarray
    components_DP: np.ndarray

    @classmethod
    def fit(cls, images_NCHW: np.ndarray, dim: int) -> "PixelFeatures":
        """Principal components of sample images, whose order matters to the last bits: sort them by id.

        Raises DataError if the images have fewer pixels than `dim`, or there are fewer images.
        """
        pixels_NP = np.ascontiguousarray(images_NCHW.reshape(len(images_NCHW), -1), dtype=np.float32)
        num_rows, num_pixels = pixels_NP.shape
        if dim > min(num_rows, num_pixels):
            raise DataError(
                f"embedder.dim {dim} is more than {num_rows} training images of {num_pixels} values allow;"
                f" set it to at most {min(num_rows, num_pixels)}"
            )
        pca = faiss.PCAMatrix(num_pixels, dim)
        pca.train(pixels_NP)
        components_DP = faiss.vector_to_array(pca.PCAMat).reshape(-1, num_pixels)[:dim]
        return cls(faiss.vector_to_array(pca.mean).astype(np.float64), components_DP.astype(np.float64))

    @property
    def dim(self) -> int:
        """D."""
        return len(self.components_DP)

    def __call__(self, images_NCHW: np.ndarray) -> np.ndarray:
        """embeddings_ND float32; a row's bits don't depend on the rows beside it."""
        centred_NP = images_NCHW.reshape(len(images_NCHW), -1) - self.mean_P
        # einsum sums each row in one fixed order; a matrix product's order depends on the batch.
        return np.einsum("np,dp->nd", centred_NP, self.components_DP).astype(np.float32)


class TimmFeatures:
    """Pooled features of a timm network, e.g. DINOv2, on images resized and normalised as it was trained."""

    def __init__(self, config: EmbedderConfig):
        """Load `config.checkpoint`, or timm's own weights. DataError if they are missing or don't fit."""
        import timm
        import torch

        if config.checkpoint is not None and not Path(config.checkpoint).is_file():
            raise DataError(f"embedder.checkpoint {config.checkpoint}: no such file; set it to a file of weights")
        self._torch = torch
        try:
            self._model = timm.create_model(
                config.model,
                pretrained=config.checkpoint is None,
                num_classes=0,
                checkpoint_path=config.checkpoint or "",
                **config.model_args,
            ).eval()
        except Exception as error:  # timm passes on whatever its hub, readers and models raise
            reason = " ".join(str(error).split())[:300]
            raise DataError(
                f"embedder {config.model} with {config.checkpoint or 'pretrained weights'}: {reason};"
                " set embedder.checkpoint and embedder.model_args to what fits"
            ) from error
        expects = timm.data.resolve_model_data_config(self._model)
        self._size = config.model_args.get("img_size", expects["input_size"][1:])
        self._mean_C11 = torch.tensor(expects["mean"])[:, None, None]
        self._std_C11 = torch.tensor(expects["std"])[:, None, None]
        self.dim = cast(int, self._model.num_features)

    def __call__(self, images_NCHW: np.ndarray) -> np.ndarray:
        """embeddings_ND float32; grey images are taken as RGB."""
        torch = self._torch
        with torch.inference_mode():
            images = torch.from_numpy(images_NCHW / 2 + 0.5)
            images = torch.nn.functional.interpolate(images, self._size, mode="bicubic", antialias=True)
            # A grey image meets three means, and so becomes the RGB image that it looks like.
            images = (images.clamp(0, 1) - self._mean_C11) / self._std_C11
            embeddings_ND: np.ndarray = self._model(images).float().numpy()
        return embeddings_ND
