"""Sampling side by side, and the pictures made of it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from ddm_ray.config import SamplingSettings
from ddm_ray.core.times import time_grid
from ddm_ray.data.loading.loader import Rows
from ddm_ray.evaluate.figures import COLUMNS, PER_CLASS, experts_figure, shown_beside
from ddm_ray.run.run import Run
from ddm_ray.sampling.request import SampleRequest
from ddm_ray.sampling.run_models import Models, load_models


@pytest.fixture(scope="module")
def mixture(random_run: Run) -> Models:
    return load_models(random_run)


def request(count: int, strategy: str = "once") -> SampleRequest:
    return SampleRequest(tuple(range(count)), torch.arange(count) % 10, SamplingSettings(steps=2, strategy=strategy))


def tile(picture: Image.Image, column: int, line: int, left: int, top: int) -> np.ndarray:
    x, y = left + column * 51, top + line * 51
    return np.asarray(picture)[y : y + 48, x : x + 48]


def test_every_class_that_has_rows_is_shown(random_run: Run) -> None:
    labels = torch.tensor([7, 2, 2, 2, 2, 7])
    train = Rows(list("abcdef"), torch.arange(6.0).view(6, 1, 1, 1), labels, torch.zeros(6, dtype=torch.int64))
    shown, real, headings = shown_beside(random_run.config, train, request(1))
    assert shown.condition.tolist() == [2] * 6 + [7] * 6
    assert len(set(shown.seeds)) == COLUMNS
    assert real.flatten().tolist() == [1, 2, 2, 3, 3, 4, 0, 0, 0, 5, 5, 5] and headings == ["2", "7"]


@pytest.mark.parametrize("num_classes", [1, 10])
def test_a_single_class_fills_the_width_without_a_heading(random_run: Run, num_classes: int) -> None:
    data = random_run.config.data.model_copy(update={"class_names": tuple(f"{label}" for label in range(num_classes))})
    config = random_run.config.model_copy(update={"data": data})
    train = Rows(
        [*map(str, range(100))],
        torch.arange(100.0).view(100, 1, 1, 1),
        torch.arange(100) % num_classes,
        torch.zeros(100, dtype=torch.int64),
    )
    _, real, headings = shown_beside(config, train, request(1))
    first = real[: len(real) // num_classes].flatten()
    assert (len(first), headings) == ((COLUMNS, None) if num_classes == 1 else (PER_CLASS, [*data.class_names]))
    assert (first[0], first[-1]) == (0, 100 - num_classes), "from all over the rows, which come shard by shard"


def test_experts_figure_samples_as_the_run_says(random_run: Run, mixture: Models) -> None:
    """The experts are asked at the run's own times, and twice a time (both branches) within its interval alone."""
    sample = SamplingSettings(steps=4, times="shifted-3", guidance_scale=2.0, guidance_interval=(0.3, 0.7))
    run = Run(random_run.store, random_run.config.model_copy(update={"sample": sample}))
    asked: list[tuple[float, int]] = []

    def watching(x: torch.Tensor, t: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        asked.append((float(t[0]), len(x)))
        return torch.zeros_like(x)

    labels, clusters = torch.arange(3), torch.zeros(3, dtype=torch.int64)
    train = Rows(list("abc"), torch.zeros(3, 1, 8, 8), labels, clusters)
    one = replace(mixture.info, num_experts=1, prior_CK=None)
    experts_figure(run, replace(mixture, info=one, experts=(watching,)), train, lambda data: data)
    times = time_grid("shifted-3", 4)[:-1].tolist()
    assert asked == [(pytest.approx(t), 6 if 0.3 < t <= 0.7 else 3) for t in times]
    assert {rows for _, rows in asked} == {3, 6}


def test_experts_figure_shows_each_expert_by_itself(random_run: Run, mixture: Models) -> None:
    """Expert 0 paints black and expert 1 white, whatever the router or the prior would choose."""

    def towards(value: float):
        return lambda x, t, label: (x - value) / t.view(-1, 1, 1, 1)

    labels, clusters = torch.zeros(4, dtype=torch.int64), torch.tensor([0, 1, 0, 1])
    train = Rows(list("abcd"), torch.zeros(4, 1, 8, 8), labels, clusters)
    picture = experts_figure(random_run, replace(mixture, experts=(towards(-1), towards(1))), train, lambda data: data)
    left = picture.width - 8 - 2 * 51
    means = [[tile(picture, column, line, left, 8).mean() for column in (0, 1)] for line in range(4)]
    assert means == [[128, 128], [0, 0], [128, 128], [255, 255]]
