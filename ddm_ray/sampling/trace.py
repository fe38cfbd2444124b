"""A picture of the routing: the experts of each image, step by step. Nothing else needs matplotlib.

Shapes: B images, S steps, K experts, H W C of an image.
"""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from ddm_ray.errors import ConfigError
from ddm_ray.spelling import one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_IMAGES = 16
INK, PALE = "#333333", "#8a8a8a"
HUES = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#332288", "#9c755f", "#bab0ac"]


def require_matplotlib() -> None:
    """ConfigError without it."""
    try:
        importlib.import_module("matplotlib")
    except ImportError:
        raise ConfigError("plots need matplotlib: install it with: pip install 'ddm-ray[evaluate]'") from None


def num_switches(routing_SBK: Tensor) -> list[int]:
    """For each image how often, from one step to the next, another expert becomes the heaviest."""
    heaviest_SB = routing_SBK.argmax(dim=2)
    switches: list[int] = (heaviest_SB[1:] != heaviest_SB[:-1]).sum(dim=0).tolist()
    return switches


def plot_routing(
    path: str | Path,
    routing_SBK: Tensor,
    times_S: Tensor,
    images: Sequence[np.ndarray] | None = None,
    titles: Sequence[str] = (),
    clusters: Sequence[int] = (),
) -> None:
    """Write a picture (PNG, SVG or PDF, by the path's ending) with a row for each image, MAX_IMAGES at most.

    A row: the image (H, W, C in [0, 1]), its title, and over t from noise to data the weights of the experts,
    stacked. `times_S`: where each step begins. `clusters`: the experts' numbers; none: 0 to K - 1. ConfigError without
    matplotlib, or for another ending.
    """
    require_matplotlib()
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    num_images, num_experts = routing_SBK.shape[1:]
    shown = min(num_images, MAX_IMAGES)
    weights_SBK = routing_SBK[:, :shown].double().cpu().numpy()
    colors: list[Any] = HUES[:num_experts]
    if num_experts > len(HUES):
        colors = list(colormaps["turbo"](np.linspace(0, 1, num_experts)))
    # Inches: a row is .9 high, title and legend and the axis of times as much together as .9.
    figure = Figure(figsize=(9, 0.9 * (shown + 1)), facecolor="white", layout="constrained")
    rows = figure.subplots(shown, 2, squeeze=False, width_ratios=(0.01 if images is None else 1, 9.5))
    for number, (picture, strip) in enumerate(rows):
        picture.axis("off")
        if images is not None:
            image = np.squeeze(images[number])
            picture.imshow(image, cmap="gray", vmin=0, vmax=1, interpolation="nearest" if len(image) < 64 else None)
        _strip(strip, weights_SBK[:, number], times_S.double().cpu().numpy(), colors)
        if number < len(titles):
            strip.set_title(one_line(titles[number], 90), loc="left", fontsize=8, color=INK, pad=3)
    strip.set_xticks([1, 0.75, 0.5, 0.25, 0], ["t = 1, noise", ".75", ".5", ".25", "0, data"])
    strip.tick_params(axis="x", length=2, labelsize=8, labelcolor=INK, color=PALE)
    which = f" (the first {shown} of {num_images} images)" if shown < num_images else ""
    used = np.flatnonzero(weights_SBK.any(axis=(0, 1))).tolist()
    figure.legend(
        handles=[Patch(color=colors[k], label=f"expert {clusters[k] if clusters else k}") for k in used],
        title=f"Which expert painted what{which}",
        loc="outside upper center",
        ncols=8,
        frameon=False,
        fontsize=8,
        handlelength=1,
    )
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


def _strip(axes: "Axes", weights_SK: np.ndarray, times_S: np.ndarray, colors: Sequence[Any]) -> None:
    # The last step reaches to t = 0, which has no weights of its own.
    edges = np.append(times_S, 0.0)
    levels = np.cumsum(np.pad(np.concatenate([weights_SK, weights_SK[-1:]]), ((0, 0), (1, 0))), axis=1)
    for k, color in enumerate(colors):
        if weights_SK[:, k].any():
            axes.fill_between(edges, levels[:, k], levels[:, k + 1], step="post", color=color, linewidth=0)
    axes.set(xlim=(1, 0), ylim=(0, 1), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
