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

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_IMAGES = 16
MAX_NAMED = 20
INK, PALE = "#333333", "#8a8a8a"
HUES = ["#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#76b7b2", "#edc948", "#ff9da7", "#9c755f", "#bab0ac"]


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
) -> None:
    """Write a picture (PNG, SVG or PDF, by the path's ending) with a row for each image, MAX_IMAGES at most.

    A row: the image (H, W, C in [0, 1]), its title, and over t from noise to data the weights of the experts,
    stacked. `times_S`: where each step begins. ConfigError without matplotlib, or for another ending.
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
    # Inches: of a row, of the header with title and legend, of the footer with the axis of times.
    row, header, footer = 0.85, 0.95, 0.4
    height = header + shown * row + footer
    figure = Figure(figsize=(9, height), facecolor="white")
    grid = figure.add_gridspec(
        shown,
        2,
        width_ratios=(0.01 if images is None else 1, 9.5),
        left=0.02,
        right=0.9,
        top=1 - header / height,
        bottom=footer / height,
        wspace=0.03,
        hspace=0.3,
    )
    switches = num_switches(routing_SBK)
    for number in range(shown):
        picture, strip = (figure.add_subplot(grid[number, column]) for column in range(2))
        picture.axis("off")
        if images is not None:
            image = np.squeeze(images[number])
            picture.imshow(image, cmap="gray", vmin=0, vmax=1, interpolation="nearest" if len(image) < 64 else None)
        _strip(strip, weights_SBK[:, number], times_S.double().cpu().numpy(), colors)
        title = titles[number] if number < len(titles) else ""
        strip.set_title(title if len(title) <= 90 else f"{title[:89]}…", loc="left", fontsize=8, color=INK, pad=3)
        counted = f"{switches[number]} switch{'' if switches[number] == 1 else 'es'}"
        strip.text(1.012, 0.5, counted, transform=strip.transAxes, va="center", fontsize=8, color=PALE)
        if number == shown - 1:
            labels = strip.set_xticks([1, 0.75, 0.5, 0.25, 0], ["t = 1, noise", ".75", ".5", ".25", "0, data"])
            strip.tick_params(axis="x", length=2, labelsize=8, labelcolor=INK, color=PALE)
            labels[0].label1.set_horizontalalignment("left")
            labels[-1].label1.set_horizontalalignment("right")
    which = f" (the first {shown} of {num_images} images)" if shown < num_images else ""
    figure.text(0.02, 1 - 0.18 / height, f"Which expert painted what{which}", fontsize=11, color=INK, va="top")
    total_K = weights_SBK.sum(axis=(0, 1))
    heaviest = np.argsort(-total_K, kind="stable")[: MAX_NAMED - 1 if (total_K > 0).sum() > MAX_NAMED else MAX_NAMED]
    handles = [Patch(color=colors[k], label=f"expert {k}") for k in sorted(heaviest) if total_K[k] > 0]
    if others := int((total_K > 0).sum()) - len(handles):
        handles.append(Patch(alpha=0, label=f"and {others} more"))
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0.014, 1 - 0.4 / height),
        ncols=min(len(handles), 10),
        frameon=False,
        fontsize=8,
        labelcolor=INK,
        handlelength=1,
        handleheight=1,
        columnspacing=1.2,
        borderaxespad=0,
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
