"""docs/study/science.md is a program that prints what it shows, and what others quote of it stands there.

`python -m tests.study.test_study_page` runs it and writes its outputs and figures anew.
"""

import re

import pytest

from tests.conftest import ROOT
from tests.pages import INTERVAL, LEFT_OUT, NUMBER, Page, PageRun, check_text, quoted, write_anew

pytestmark = pytest.mark.chaos
SCIENCE = "docs/study/science.md"


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> PageRun:
    return PageRun.of(Page.read(SCIENCE), tmp_path_factory.mktemp("page"))


def test_the_page_shows_what_its_blocks_print(ran: PageRun) -> None:
    ran.check_outputs()


def test_the_page_draws_the_figures_that_it_shows(ran: PageRun) -> None:
    ran.check_figures()


def test_the_prose_quotes_only_what_the_last_output_shows_and_notes_name_their_source() -> None:
    check_text(Page.read(SCIENCE), "0.62 of the monolith's distance", "0.46 of the monolith's distance")


def test_what_others_quote_of_the_study_stands_on_its_page() -> None:
    shown = "".join(Page.read(SCIENCE).shown)
    printed = {float(number) for number in NUMBER.findall(shown)}
    summary = (ROOT / "docs/study/summary.md").read_text()
    summed = quoted(LEFT_OUT.sub(" ", summary))
    sections = re.split(r"^## ", (ROOT / "study/RESULTS.md").read_text(), flags=re.MULTILINE)
    studies = [each for each in sections if re.match(r"science.py [a-z-]+, cpu", each)]
    claims = [line.split("|")[2] for each in studies for line in each.splitlines() if line.startswith("| ")]
    results = [number for value in claims for number in quoted(value)]
    assert len(summed) >= 50 and len(results) >= 30
    assert not [number for number in summed + results if float(number) not in printed]
    # A ratio with its interval is one that is printed, whole.
    intervals = [tuple(map(float, each)) for value in [*claims, summary] for each in INTERVAL.findall(value)]
    assert len(intervals) >= 25
    assert {*intervals} <= {tuple(map(float, each)) for each in INTERVAL.findall(shown)}


if __name__ == "__main__":
    write_anew(Page.read(SCIENCE))
