"""Names in lines for people, cut short where there are many; and sizes."""

import os
import subprocess

import pytest

from ddm_ray.spelling import amount, shell_line, some


@pytest.mark.parametrize(
    ("names", "most", "text"),
    [
        ([], 5, ""),
        (["a"], 5, "a"),
        (("a", "b"), 2, "a, b"),
        (["a", "b", "c"], 2, "a, b and 1 more"),
        ({"a": 1, "b": 2, "c": 3}, 1, "a and 2 more"),
        ([str(number) for number in range(5)], 5, "0, 1, 2, 3, 4"),
        ([str(number) for number in range(2000)], 5, "0, 1, 2, 3, 4 and 1,995 more"),
    ],
)
def test_the_first_names_and_how_many_more(names: list[str], most: int, text: str) -> None:
    assert some(names, most) == text
    if most == 5:
        assert some(names) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (999, "999 B"), (999.6, "1 kB"), (1_234_567, "1.23 MB"), (999_600_000, "1 GB"), (2e15, "2 PB")],
)
def test_a_size_has_three_digits(value: float, text: str) -> None:
    assert amount(value) == text


@pytest.mark.contract
@pytest.mark.parametrize(
    "word",
    [
        "runs/a",
        "my run #1",
        "it's",
        "$HOME",
        "~other",
        "a; b'c\\",
        "a\nb",
        "no\N{NO-BREAK SPACE}break",
        "é",
        "\udce9",
        "",
    ],
)
def test_a_printed_line_is_what_a_shell_reads(word: str) -> None:
    line = shell_line("printf", "%s", word)
    assert line.isprintable() and "; " not in line
    assert subprocess.run(["bash", "-c", line], capture_output=True, check=True).stdout == os.fsencode(word)
