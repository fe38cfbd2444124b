"""Text that others wrote: marks, comments and line ends of other systems are no part of it."""

import unicodedata

import pytest

from ddm_ray.plain_text import from_utf8, index_of, stripped, words_of_lines


def test_a_byte_order_mark_is_no_part_of_a_text() -> None:
    assert from_utf8("\ufeffcafé\r\n".encode()) == "café\r\n"
    assert stripped("\ufeff café\r\n") == "café"
    assert words_of_lines(from_utf8("\ufefffirst # one".encode())) == ["first"]
    with pytest.raises(UnicodeDecodeError):
        from_utf8("café".encode("utf-16"))


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_words_of_lines_have_no_comments(end: str) -> None:
    lines = ["# tokens of the lab", "first", "", "  second third  # of the night shift", "four#th", "#fifth"]
    assert words_of_lines(end.join(lines)) == ["first", "second", "third", "four#th"]


def test_names_are_found_in_any_form() -> None:
    names = ["bar", unicodedata.normalize("NFD", "café")]
    assert index_of(unicodedata.normalize("NFC", "café"), names) == index_of(names[1], names) == 1
    assert index_of("cafe", names) is None
