"""The picture of a routing: its colours are the weights, where and when they were."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb
from PIL import Image

from ddm_ray.core.times import time_grid
from ddm_ray.errors import ConfigError
from ddm_ray.sampling.output import DDMOutput
from ddm_ray.sampling.trace import HUES, num_switches


def one_hot(experts: list[list[int]], num_experts: int = 3) -> torch.Tensor:
    """routing_SBK of one expert a step; `experts` are rows of steps, an image each."""
    return torch.nn.functional.one_hot(torch.tensor(experts).T, num_experts).double()


def output(routing_SBK: torch.Tensor, times: str = "uniform", **changes) -> DDMOutput:
    steps, num_images, _ = routing_SBK.shape
    fields = {
        "images": torch.rand(num_images, 3, 8, 8, generator=torch.Generator().manual_seed(0)),
        "seeds": tuple(range(num_images)),
        "prompts": ("a cat",) * num_images,
        "routing_SBK": routing_SBK,
        "times_S": time_grid(times, steps)[:-1],
        "num_expert_rows": 0,
        "num_router_rows": 0,
    }
    return DDMOutput(**(fields | changes))


def pixels(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path).convert("RGB")).astype(int)


def colored(image: np.ndarray, expert: int) -> np.ndarray:
    """Bool (H, W): pixels of an expert's colour."""
    rgb = np.array([round(255 * part) for part in to_rgb(HUES[expert])])
    return (np.abs(image - rgb) <= 1).all(axis=2)


def test_switches_are_counted_between_steps() -> None:
    assert num_switches(one_hot([[0, 0, 0, 0], [0, 1, 1, 0], [2, 1, 0, 2]])) == [0, 2, 3]
    assert num_switches(one_hot([[1]])) == [0]


def test_an_expert_held_is_a_strip_of_one_colour(tmp_path: Path) -> None:
    output(one_hot([[1] * 5])).plot_routing(tmp_path / "once.png")
    image = pixels(tmp_path / "once.png")
    assert colored(image, 1).sum() > 50_000
    assert not colored(image, 0).any()
    assert not colored(image, 2).any()


@pytest.mark.parametrize("times", ["uniform", "shifted-3"])
def test_time_runs_from_noise_left_to_data_right_as_the_steps_did(tmp_path: Path, times: str) -> None:
    """One switch after the first of four steps: the first expert has 1 - t of that step's width, on the left."""
    output(one_hot([[0, 2, 2, 2]]), times).plot_routing(tmp_path / "picture.png")
    image = pixels(tmp_path / "picture.png")
    # Below the legend, in the middle of the strip.
    line = image[int(0.6 * len(image))]
    first, second = (np.flatnonzero(colored(line[None], expert)[0]) for expert in (0, 2))
    assert first.max() < second.min()
    share = len(first) / (len(first) + len(second))
    assert share == pytest.approx(1 - float(time_grid(times, 4)[1]), abs=0.01)


def test_weights_are_heights(tmp_path: Path) -> None:
    output(torch.tensor([0.75, 0.25, 0.0]).expand(4, 1, 3)).plot_routing(tmp_path / "picture.png")
    image = pixels(tmp_path / "picture.png")
    column = image[:, image.shape[1] // 2]
    heavy, light = (colored(column[None], expert)[0].sum() for expert in (0, 1))
    assert heavy / (heavy + light) == pytest.approx(0.75, abs=0.02)


def test_the_image_stands_beside_its_strip(tmp_path: Path) -> None:
    red = torch.zeros(1, 3, 8, 8)
    red[:, 0] = 1
    for number, images in enumerate([red, red.permute(0, 2, 3, 1).numpy(), [Image.new("RGB", (8, 8), (255, 0, 0))]]):
        output(one_hot([[0, 1]]), images=images).plot_routing(tmp_path / f"{number}.png")
        red_pixels = (pixels(tmp_path / f"{number}.png") == (255, 0, 0)).all(axis=2)
        assert red_pixels.sum() > 5_000
        assert np.nonzero(red_pixels)[1].max() < red_pixels.shape[1] / 8
    # Latents are no picture: their strips stand alone.
    output(one_hot([[0, 1]]), images=red, latent=True).plot_routing(tmp_path / "latent.png")
    assert not (pixels(tmp_path / "latent.png") == (255, 0, 0)).all(axis=2).any()


def test_of_many_images_sixteen_are_shown_and_that_is_said(tmp_path: Path) -> None:
    for count in (16, 20):
        output(one_hot([[0, 1]] * count)).plot_routing(tmp_path / f"{count}.svg")
    sixteen, twenty = ((tmp_path / f"{count}.svg").read_text() for count in (16, 20))
    assert sixteen.count("<image") == twenty.count("<image") == 16
    assert "first 16 of 20 images" in twenty
    assert "first 16" not in sixteen


def test_an_unknown_ending_and_a_missing_library_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"picture\.doc: .*not supported") as raised:
        output(one_hot([[0, 1]])).plot_routing(tmp_path / "picture.doc")
    assert "\n" not in str(raised.value)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"plots need matplotlib: install it with: pip install 'ddm-ray\[evaluate\]'"):
        output(one_hot([[0, 1]])).plot_routing(tmp_path / "picture.png")
