"""Pictures of a partition's report: small images of rows, and embeddings projected to two dimensions.

N rows, D dimensions of an embedding, K clusters; H x W pixels, C channels.
"""

from typing import Any

import numpy as np
from PIL import Image

from ddm_ray.pictures.figure import figure, figure_png
from ddm_ray.pictures.png import to_png

TILE = 64


def tile_png(image: Image.Image) -> bytes:
    """The image as an RGB PNG, its longer side at most TILE pixels."""
    image = image.convert("RGB")
    if max(image.size) > TILE:
        image.thumbnail((TILE, TILE), Image.Resampling.LANCZOS)
    return to_png(image)


def to_image(pixels_CHW: np.ndarray) -> Image.Image:
    """An image of uint8 pixels with 1 or 3 channels."""
    pixels_HWC = np.ascontiguousarray(pixels_CHW.transpose(1, 2, 0))
    return Image.fromarray(pixels_HWC[:, :, 0] if pixels_HWC.shape[2] == 1 else pixels_HWC)


def projection_png(embedding_ND: np.ndarray, cluster_N: np.ndarray, num_clusters: int) -> bytes:
    """Rows on their two principal components, coloured by cluster; each cluster's number is at its mean."""
    from matplotlib.patheffects import withStroke

    mean_D, axes_D2 = principal_axes(embedding_ND)
    points_N2 = (embedding_ND - mean_D) @ axes_D2
    projection = figure(9, 6.5)
    axes = projection.add_subplot()
    # Drawn in the rows' order, so that no cluster covers all others.
    axes.scatter(points_N2[:, 0], points_N2[:, 1], s=7, c=_colours(num_clusters)[cluster_N], alpha=0.6, linewidths=0)
    outline = [withStroke(linewidth=3.5, foreground="white")]
    for cluster in np.unique(cluster_N).tolist():
        where: Any = tuple(points_N2[cluster_N == cluster].mean(axis=0).tolist())
        axes.annotate(str(cluster), where, ha="center", va="center", fontsize=15, weight="bold", path_effects=outline)
    axes.set_xlabel("first principal component")
    axes.set_ylabel("second")
    axes.spines[["top", "right"]].set_visible(False)
    return figure_png(projection)


def principal_axes(rows_ND: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(mean_D, axes_D2) of the two directions of largest variance, each with a positive largest entry."""
    mean_D = rows_ND.mean(axis=0, dtype=np.float64)
    centred_ND = rows_ND - mean_D
    _, vectors_DD = np.linalg.eigh(centred_ND.T @ centred_ND)
    axes_D2 = vectors_DD[:, ::-1][:, :2]
    axes_D2 = axes_D2 * np.sign(axes_D2[np.abs(axes_D2).argmax(axis=0), np.arange(axes_D2.shape[1])])
    if axes_D2.shape[1] < 2:
        axes_D2 = np.concatenate([axes_D2, np.zeros((len(axes_D2), 1))], axis=1)
    return mean_D, axes_D2


def _colours(count: int) -> np.ndarray:
    import matplotlib

    if count <= 20:
        return np.array(matplotlib.colormaps["tab10" if count <= 10 else "tab20"](np.arange(count)))
    # Gives clusters with adjacent numbers very different hues.
    return np.array(matplotlib.colormaps["hsv"](np.arange(count) * 0.618034 % 1))
