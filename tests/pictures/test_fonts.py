"""A font that can draw a text is taken; where there is none, that is known beforehand."""

import pytest

from ddm_ray.pictures.fonts import font_for


@pytest.mark.parametrize("text", ["crow", "Köln, ñandú", "собака", "σκύλος", "", "a\tb"])
def test_letters_that_a_font_has(text: str) -> None:
    font = font_for([text], 15)
    assert font is not None
    assert font.getlength(text.replace("\t", " ")) >= 0


def test_the_first_font_is_kept_while_it_suffices() -> None:
    assert font_for(["crow"], 15) is font_for(["heron"], 15)
    assert font_for(["crow", "собака"], 15) is font_for(["собака"], 15) is not font_for(["crow"], 15)


def test_letters_that_no_font_here_has() -> None:
    assert font_for(["\ue123\U0010fffe"], 15) is None
