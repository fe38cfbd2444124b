"""Embedders: what turns images into the vectors that are clustered. Images are uint8 NHWC, grey (C = 1) or RGB.

N rows, B of them in a batch, C channels, H x W pixels, P = C*H*W values of an image, D dimensions of an embedding.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import faiss
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from ddm_ray.config import EmbedderConfig
from ddm_ray.errors import CorruptArtifact, DataError
from ddm_ray.models import third_party
from ddm_ray.remedies import Begin

BLOCK_VALUES = 2**22
"""Most values of images (float64) that PixelEmbedder holds at once: 32 MiB."""


class Embedder(Protocol):
    """An embedder: pixels_NHWC uint8 -> embeddings_ND float32.

    `fingerprint`: 16 hex digits that another network would change; empty for one that the run itself has fitted.
    """

    @property
    def dim(self) -> int: ...

    @property
    def fingerprint(self) -> str: ...

    def __call__(self, pixels_NHWC: np.ndarray) -> np.ndarray: ...


def make_embedder(
    config: EmbedderConfig,
    pixel_embedder: "PixelEmbedder | None",
    device: str = "cpu",
    field: str = "embedder",
    exact: bool = False,
) -> Embedder:
    """The embedder that this `field` of a run's configuration describes; `pixel_embedder` is the fitted one of pixels.

    On a GPU its network computes in bf16, which moves embeddings by a hundredth and hardly a row to another cluster;
    `exact`: in fp32, as on a CPU.

    Raises DataError, ConfigError or CorruptArtifact if its network can't be loaded.
    """
    if config.kind == "pixels":
        assert pixel_embedder is not None
        return pixel_embedder
    from ddm_ray.models import embedder_networks  # torch, which pixels do without

    if config.kind in ("timm", "lite0"):
        return embedder_networks.TimmEmbedder(config, device, field, exact)
    if config.kind == "inception":
        return embedder_networks.InceptionEmbedder(config, device, field)
    return embedder_networks.TransformersEmbedder(config, device, field, exact)


@dataclass(frozen=True)
class PixelEmbedder:
    """The first D principal components of the pixels in [-1, 1]: mean_P and components_DP, float64."""

    mean_P: np.ndarray
    components_DP: np.ndarray

    @classmethod
    def fit(cls, pixels_NHWC: np.ndarray, dim: int) -> "PixelEmbedder":
        """Principal components of sample images. Their order matters to the last bits: sort them by id.

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

    fingerprint = ""

    @property
    def dim(self) -> int:
        """D."""
        return len(self.components_DP)

    def __call__(self, pixels_NHWC: np.ndarray) -> np.ndarray:
        """embeddings_ND float32; a row's bits don't depend on the rows beside it."""
        embeddings_ND = np.empty((len(pixels_NHWC), self.dim), np.float32)
        for rows in row_slices(len(pixels_NHWC), max(1, BLOCK_VALUES // len(self.mean_P))):
            centred_BP = _flat(pixels_NHWC[rows]) - self.mean_P
            # einsum sums each row in one fixed order; a matrix product's order depends on the batch.
            embeddings_ND[rows] = np.einsum("bp,dp->bd", centred_BP, self.components_DP)
        return embeddings_ND


def row_slices(num_rows: int, size: int) -> Iterator[slice]:
    """Slices of so many rows, the last of what is left."""
    return (slice(start, start + size) for start in range(0, num_rows, size))


def _flat(pixels_NHWC: np.ndarray) -> np.ndarray:
    """images_NP float32 in [-1, 1], in the order C, H, W."""
    images_NP = pixels_NHWC.transpose(0, 3, 1, 2).reshape(len(pixels_NHWC), -1).astype(np.float32)
    images_NP /= np.float32(127.5)
    images_NP -= np.float32(1)
    return images_NP
