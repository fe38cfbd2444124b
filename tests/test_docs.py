"""The pages on the mixture are a program that is run from top to bottom, prints what it shows, and draws its figures.

And the architecture's table of rooms names files that there are.

`python -m tests.test_docs` runs it and writes its outputs and figures again.
"""

import re

import pytest

from tests.conftest import ROOT
from tests.pages import Page, PageRun, check_text, same, write_anew

MIXTURE = tuple(f"docs/concepts/{name}.md" for name in ("mixture", "mixture-strategies", "mixture-once"))


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> PageRun:
    return PageRun.of(Page.read(*MIXTURE), tmp_path_factory.mktemp("page"))


@pytest.mark.chaos
def test_the_page_shows_what_its_blocks_print(ran: PageRun) -> None:
    ran.check_outputs()


@pytest.mark.chaos
def test_the_page_draws_the_figures_that_it_shows(ran: PageRun) -> None:
    ran.check_figures()


def test_the_prose_quotes_only_what_the_last_output_shows_and_notes_name_their_source() -> None:
    check_text(Page.read(*MIXTURE), "0.79 of the images stay", "0.45 of the images stay")


@pytest.mark.parametrize(
    ("shown", "printed", "equal"),
    [
        ("full 0.0004 .45", "full  0.0005 .45", True),
        ("top-1 1.020", "top-1 1.060", False),
        ("full 200", "full 201", True),
        ("full 1.0", "once 1.0", False),
        ("full 1.0", "full 1.0 2.0", False),
    ],
)
def test_a_number_that_drifted_would_be_found(shown: str, printed: str, equal: bool) -> None:
    assert same(shown, printed) is equal


def test_files_that_the_table_of_rooms_names_are_in_the_room_that_it_says() -> None:
    table = (ROOT / "docs/concepts/architecture.md").read_text().partition("\n## What is where\n")[2]
    rooms = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| `")]
    named = 0
    for places, words in rooms:
        folders = re.findall(r"`([a-z_/]+/)`", places)
        roots = [ROOT / place if (ROOT / place).is_dir() else ROOT / "ddm_ray" / place for place in folders]
        for file in re.findall(r"`([\w/]+\.(?:py|md))`", words):
            named += 1
            assert any([*root.rglob(file)] for root in roots or [ROOT / "ddm_ray"]), f"{places}: {file}"
    assert named > 100


if __name__ == "__main__":
    write_anew(Page.read(*MIXTURE))
