"""Rules for the pages of docs/: short, in the navigation, and naming files that there are."""

import re

import pytest
import yaml

from tests.conftest import ROOT

DOCS = ROOT / "docs"
LONG = {"study/science.md", "reference/configuration.md"}
"""The study's long page, and one that is generated."""
MAX_LINES = 300
NAMED = re.compile(r"`(?P<path>(?:benchmarks|cluster_configs|ddm_ray|docs|jobs|serving|study|tests)/[\w./-]+)`")


def pages() -> dict[str, str]:
    """Text of each page, by its path below docs/."""
    return {str(page.relative_to(DOCS)): page.read_text() for page in sorted(DOCS.rglob("*.md"))}


def in_navigation(entry: object) -> list[str]:
    """Pages that a part of the navigation names."""
    match entry:
        case str():
            return [entry]
        case dict():
            return [page for part in entry.values() for page in in_navigation(part)]
        case list():
            return [page for part in entry for page in in_navigation(part)]
    raise AssertionError(entry)


def test_pages_are_short() -> None:
    long = {name: text.count("\n") for name, text in pages().items() if text.count("\n") > MAX_LINES}
    assert long.keys() <= LONG, long
    assert "study/science.md" in long


def test_each_page_is_in_the_navigation_once() -> None:
    named = in_navigation(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert sorted(named) == sorted(pages())


def test_files_that_pages_name_exist() -> None:
    named = [(page, path) for page, text in pages().items() for path in NAMED.findall(text)]
    assert len(named) > 40
    places = (ROOT, ROOT / "ddm_ray")  # the page on architecture names rooms of the package
    assert [each for each in named if not any((place / each[1]).exists() for place in places)] == []


def test_a_page_begins_with_its_title() -> None:
    assert [name for name, text in pages().items() if not re.match(r"(---\n.*?---\n\n)?# \S", text, re.DOTALL)] == []


LINK = re.compile(r"\]\((?P<target>[^)#\s:]+)(?:#[^)\s]*)?\)")


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", "SECURITY.md", "cluster_configs/README.md", "study/README.md"]
)
def test_pages_outside_of_docs_link_to_files(page: str) -> None:
    targets = LINK.findall((ROOT / page).read_text())
    assert [target for target in targets if not (ROOT / page).parent.joinpath(target).exists()] == []
