"""A font that can draw a text is taken; where there is none, that is known beforehand."""

import pytest

from ddm_ray.pictures.fonts import font_for, font_of_most


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


def test_texts_of_which_no_font_has_all_letters_are_drawn_as_far_as_they_can_be() -> None:
    texts = ["собака", "\ue123\U0010fffe"]
    assert font_for(texts, 15) is None
    assert font_of_most(texts, 15) is font_for(["собака"], 15) is not font_for(["crow"], 15)
    assert font_of_most(["crow"], 15) is font_for(["crow"], 15)
