"""Pictures of a partition: rows of images by cluster, a projection of embeddings, fine centroids beside coarse ones.

N rows, D dimensions of an embedding, F fine centroids, K clusters; H x W pixels, C channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from ddm_ray.pictures.figure import figure, figure_png
from ddm_ray.pictures.png import to_png

PAPER, INK, DIM = (255, 255, 255), (40, 40, 48), (112, 118, 130)
TILE, GAP, MARGIN, FONT_SIZE = 64, 3, 10, 15


@dataclass(frozen=True)
class ClusterImages:
    """One cluster's line in the picture: two lines of text, and groups of images."""

    title: str
    subtitle: str
    groups: Sequence[Sequence[Image.Image]]


def tile(image: Image.Image) -> Image.Image:
    """The image as it is kept for a picture: RGB, its longer side at most TILE pixels."""
    image = image.convert("RGB")
    if max(image.size) > TILE:
        image.thumbnail((TILE, TILE), Image.Resampling.LANCZOS)
    return image


def to_image(pixels_CHW: np.ndarray) -> Image.Image:
    """uint8 pixels of 1 or 3 channels."""
    pixels_HWC = np.ascontiguousarray(pixels_CHW.transpose(1, 2, 0))
    return Image.fromarray(pixels_HWC[:, :, 0] if pixels_HWC.shape[2] == 1 else pixels_HWC)


def clusters_png(lines: Sequence[ClusterImages], headings: Sequence[str], group_size: int) -> bytes:
    """A line of images for each cluster, in groups of `group_size` under their headings; small images enlarged."""
    font, small = ImageFont.load_default(FONT_SIZE), ImageFont.load_default(FONT_SIZE - 3)
    texts = [(font, line.title) for line in lines] + [(small, line.subtitle) for line in lines]
    left = 2 * MARGIN + round(max(face.getlength(text) for face, text in texts))
    top = MARGIN + FONT_SIZE + 8
    step = TILE + GAP
    group_width = group_size * step + 2 * MARGIN
    picture = Image.new("RGB", (left + len(headings) * group_width, top + len(lines) * step + MARGIN), PAPER)
    draw = ImageDraw.Draw(picture)
    for group, heading in enumerate(headings):
        draw.text((left + group * group_width, MARGIN), heading, DIM, small)
    for number, line in enumerate(lines):
        y = top + number * step
        draw.text((left - MARGIN, y + TILE / 2 - 2), line.title, INK, font, anchor="rb")
        draw.text((left - MARGIN, y + TILE / 2 + 2), line.subtitle, DIM, small, anchor="rt")
        for group, images in enumerate(line.groups):
            for column, image in enumerate(images):
                scale = max(1, TILE // max(image.size))
                size = (image.width * scale, image.height * scale)
                x = left + group * group_width + column * step
                picture.paste(image.resize(size, Image.Resampling.BICUBIC), (x, y))
    return to_png(picture)


def projection_png(points_N2: np.ndarray, cluster_N: np.ndarray, centres_K2: np.ndarray) -> bytes:
    """Rows coloured by cluster in two dimensions, with the clusters' numbers at their centres (NaN: none)."""
    from matplotlib.patheffects import withStroke

    projection = figure(9, 6.5)
    axes = projection.add_subplot()
    colours_K4 = _colours(len(centres_K2))
    # In the rows' own order, so that no cluster is painted over all others.
    axes.scatter(points_N2[:, 0], points_N2[:, 1], s=7, c=colours_K4[cluster_N], alpha=0.6, linewidths=0)
    for cluster, centre in enumerate(centres_K2):
        if np.isfinite(centre).all():
            outline = [withStroke(linewidth=3.5, foreground="white")]
            where: Any = (float(centre[0]), float(centre[1]))
            axes.annotate(
                str(cluster), where, ha="center", va="center", fontsize=15, weight="bold", path_effects=outline
            )
    axes.set_xlabel("first principal component")
    axes.set_ylabel("second")
    axes.spines[["top", "right"]].set_visible(False)
    return figure_png(projection)


def fine_png(distance_KF: np.ndarray, fine_to_coarse_F: np.ndarray) -> bytes:
    """The map from fine centroids to coarse ones: their distances, the fine ones side by side by cluster."""
    num_clusters = len(distance_KF)
    own_F = distance_KF[fine_to_coarse_F, np.arange(len(fine_to_coarse_F))]
    order = np.lexsort((own_F, fine_to_coarse_F))
    centroids = figure(9, min(8.0, 1.6 + 0.3 * num_clusters))
    axes = centroids.add_subplot()
    drawn = axes.imshow(distance_KF[:, order], aspect="auto", interpolation="nearest", cmap="viridis_r")
    edges = np.flatnonzero(np.diff(fine_to_coarse_F[order])) + 0.5
    if num_clusters <= 64:
        axes.vlines(edges, -0.5, num_clusters - 0.5, color="white", linewidth=0.8)
    if num_clusters <= 24:
        axes.set_yticks(range(num_clusters))
    axes.set_xlabel("fine centroids, by cluster and then by distance from its centroid")
    axes.set_ylabel("cluster")
    centroids.colorbar(drawn, ax=axes, label="distance")
    return figure_png(centroids)


def principal_axes(rows_ND: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(mean_D, axes_D2) of the two directions of most variance, each with its largest entry positive."""
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
    # Neighbours in number far apart in hue.
    return np.array(matplotlib.colormaps["hsv"](np.arange(count) * 0.618034 % 1))
