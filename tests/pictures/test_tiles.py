"""Lines of tiles: colours, strips and empty places are where the numbers say."""

from collections.abc import Sequence

import numpy as np
import pytest
from PIL import Image, ImageColor

from ddm_ray.pictures.fonts import font_of_most
from ddm_ray.pictures.tiles import EMPTY, FRAME, STRIP, Tile, TileLine, TilePicture, spans_of_experts, wrapped

COLOURS = ("#0000ff", "#00ff00", "#ff0000")
SIDE = 80 + 2 * FRAME


def one_hot(experts: Sequence[int]) -> np.ndarray:
    return np.eye(3)[list(experts)]


def drawn(tiles: Sequence[Tile | None], groups: Sequence[str] = ()) -> np.ndarray:
    line = TileLine("label", "note", tiles, words=["none"] * len(groups))
    words = ("title", "a sentence", [("heading", [line])], "a footnote")
    return np.asarray(TilePicture(*words, groups, len(tiles), COLOURS).draw()).astype(int)


def places(picture: np.ndarray, colour: str) -> np.ndarray:
    """Bool (H, W): pixels of this colour."""
    return (picture == ImageColor.getrgb(colour)).all(axis=2)


def grey(value: int) -> Image.Image:
    return Image.new("L", (8, 8), value)


def test_a_frame_has_its_colour_and_an_image_is_enlarged() -> None:
    picture = drawn([Tile(grey(100), COLOURS[2])])
    assert places(picture, COLOURS[2]).sum() == SIDE**2 - 80**2
    assert places(picture, "#646464").sum() == 80**2


def test_a_strip_shows_each_expert_for_its_steps() -> None:
    """Expert 0 in the first quarter, expert 2 after it: in the strip alone, since the frame is expert 1's."""
    picture = drawn([Tile(grey(0), COLOURS[1], one_hot([0] * 5 + [2] * 15))])
    columns = [places(picture, COLOURS[expert]).any(axis=0).nonzero()[0] for expert in (0, 2)]
    assert [len(each) for each in columns] == [pytest.approx(SIDE / 4, abs=1), pytest.approx(3 * SIDE / 4, abs=1)]
    assert columns[0][-1] + 1 == columns[1][0]
    assert np.ptp(places(picture, COLOURS[2]).any(axis=1).nonzero()[0]) == STRIP - 1


def test_experts_asked_together_share_the_height() -> None:
    picture = drawn([Tile(grey(0), COLOURS[1], np.tile([0.25, 0.0, 0.75], (10, 1)))])
    first, last = (places(picture, COLOURS[expert]).sum() for expert in (0, 2))
    assert first == SIDE * STRIP / 4
    assert 0.7 * 3 * first < last < 3 * first, "less by the letters on it"


def test_an_empty_place_is_pale_and_the_picture_as_high_as_its_lines() -> None:
    full, empty = drawn([Tile(grey(0)), Tile(grey(0))], ["a"]), drawn([None, None], ["a"])
    assert not places(full, EMPTY).any()
    assert 1.9 * SIDE**2 < places(empty, EMPTY).sum() < 2 * SIDE**2, "less by the word"
    half = drawn([Tile(grey(0)), None], ["a"])
    assert 0.8 * SIDE**2 < places(half, EMPTY).sum() < SIDE**2, "the word stands in the empty place"
    assert full.shape == empty.shape == half.shape
    assert drawn([Tile(grey(0), COLOURS[0], one_hot([0]))]).shape[0] > drawn([Tile(grey(0), COLOURS[0])]).shape[0]


def test_stretches_are_of_one_expert_that_has_half() -> None:
    assert spans_of_experts(one_hot([1, 1, 0, 0, 0, 2])) == [(0, 2, 1), (2, 5, 0), (5, 6, 2)]
    assert spans_of_experts(np.array([[0.4, 0.3, 0.3], [0.1, 0.8, 0.1]])) == [(1, 2, 1)]


def test_words_are_broken_at_spaces_and_none_is_lost() -> None:
    font, text = font_of_most(["a"], 20), "one two three four five six seven eight nine ten"
    lines = wrapped(text, font, 150)
    assert len(lines) > 2 and " ".join(lines) == text
    assert all(font.getlength(line) <= 150 for line in lines)
    assert wrapped("unbreakable", font, 10) == ["unbreakable"]
