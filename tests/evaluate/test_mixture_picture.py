"""The picture of the mixture: frames and strips have the colours of the experts that were asked."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ddm_ray.config import SamplingSettings
from ddm_ray.evaluate import mixture_picture as pictured
from ddm_ray.evaluate.candidates import Candidate, Lineup
from ddm_ray.evaluate.real_rows import RealRows
from ddm_ray.pictures.tiles import TileLine, TilePicture
from ddm_ray.run.run import Run
from ddm_ray.sampling.request import SampleRequest
from ddm_ray.sampling.run_models import load_models, monolith_info
from ddm_ray.sampling.trace import HUES

pytestmark = pytest.mark.contract


def lines_of(run: Run, monkeypatch: pytest.MonkeyPatch, rows: RealRows, strategy: str = "top-1") -> dict[str, TileLine]:
    """The picture's lines by their labels. Expert 0 paints black and expert 1 white."""

    def towards(value: float) -> Any:
        return lambda x, t, label: (x - value) / t.view(-1, 1, 1, 1)

    mixture = replace(load_models(run), experts=(towards(-1), towards(1)))
    alone = replace(mixture, info=monolith_info(run), experts=(towards(0),), router=None)
    candidates = [
        Candidate("monolith", alone, SamplingSettings(steps=4, strategy="oracle"), 1),
        *(Candidate(name, mixture, SamplingSettings(steps=4, strategy=name), 1) for name in ("once", "top-1")),
    ]
    lineup = Lineup(mixture, {}, tuple(candidates), {}, {})
    shown: list[TilePicture] = []

    def draw(picture: TilePicture) -> Image.Image:
        shown.append(picture)
        return Image.new("RGB", (1, 1))

    monkeypatch.setattr(TilePicture, "draw", draw)
    request = SampleRequest((0,), torch.tensor([0]), SamplingSettings(steps=4))
    pictured.mixture_picture(run, lineup, rows, request, lambda data: data, strategy, "")
    return {line.label: line for _, lines in shown[0].sections for line in lines}


def test_an_image_is_framed_by_the_expert_that_painted_it(random_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = lines_of(random_run, monkeypatch, RealRows.of(random_run), "once")
    assert [*lines] == ["expert 0", "expert 1", "real", "monolith", "mixture"]
    painted = lines["mixture"].tiles
    brightness = [np.asarray(tile.image).mean() for tile in painted if tile]
    assert len(painted) == 20 and {*brightness} == {0, 255}
    for tile, value in zip(painted, brightness, strict=True):
        assert tile is not None and tile.share_SK is not None
        assert tile.colour == HUES[int(value > 0)]
        assert tile.share_SK.tolist() == [[value == 0, value > 0]] * 4


def test_experts_are_shown_their_own_training_images(random_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A digit that an expert has no image of is an empty place, and held-out rows are never shown."""
    rows = RealRows.of(random_run)
    data_NCHW = torch.where((rows.train.cluster_N == 0).view(-1, 1, 1, 1), -1.0, 1.0).expand(
        -1, *rows.train.data_NCHW.shape[1:]
    )
    kept = torch.nonzero((rows.train.label_N != 3) | (rows.train.cluster_N == 0))[:, 0]
    own = SimpleNamespace(
        data_NCHW=data_NCHW[kept], label_N=rows.train.label_N[kept], cluster_N=rows.train.cluster_N[kept]
    )
    changed = replace(rows, train=own, heldout=None, shown=rows.train)  # type: ignore[arg-type]
    lines = lines_of(random_run, monkeypatch, changed)
    for expert, value in ((0, 0), (1, 255)):
        tiles = lines[f"expert {expert}"].tiles
        assert {np.asarray(tile.image).mean() for tile in tiles if tile} == {value}
        assert {tile.colour for tile in tiles if tile} == {HUES[expert]}
        counts = torch.bincount(own.label_N[own.cluster_N == expert], minlength=10).clamp(max=2).tolist()
        assert [tile is None for tile in tiles] == [place >= count for count in counts for place in (0, 1)]
        assert counts[3] == (0 if expert else 2)


def test_of_a_rare_digit_there_is_one_image_and_their_number(random_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the picture would show nothing of what its sentence says."""
    rows = RealRows.of(random_run)
    cluster_N = torch.zeros(400, dtype=torch.int64)
    cluster_N[:3] = 1  # of 100 images of each of four digits, 3 of a 0
    own = SimpleNamespace(
        data_NCHW=rows.train.data_NCHW[torch.arange(400) % 10],
        label_N=torch.arange(400) // 100,
        cluster_N=cluster_N,
    )
    lines = lines_of(random_run, monkeypatch, replace(rows, train=own, shown=rows.train))  # type: ignore[arg-type]
    assert [tile is None for tile in lines["expert 1"].tiles[:4]] == [False, True, True, True]
    assert lines["expert 1"].words[:2] == ["3 in all", "none"] and lines["expert 0"].words[0] == "97 in all"
    assert None not in lines["expert 0"].tiles[:8]
