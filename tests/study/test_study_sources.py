"""Sources and a format of the study's package keep the contract of all, are registered, and credit their pictures."""

from pathlib import Path

import pytest

from ddm_ray.data.sources import collection, registry
from ddm_ray_study.idx import Idx
from ddm_ray_study.sources import Domains, Emoji, Patches
from tests.conftest import ROOT
from tests.data.sources.contract import check_format, check_named
from tests.study.test_idx import drawn, written

CLASSES = {"emoji": Emoji, "domains": Domains, "patches": Patches}


def test_the_package_registers_them() -> None:
    """As `make env` has installed it."""
    assert {word: registry.SOURCES[word] for word in registry.SOURCES if word in CLASSES} == CLASSES
    assert isinstance(collection.format_named("idx"), Idx)


@pytest.mark.chaos
@pytest.mark.parametrize("word", CLASSES)
def test_a_source_keeps_the_contract_and_has_a_credit(word: str) -> None:
    check_named(word)
    credits = " ".join((ROOT / "study/README.md").read_text().replace("> ", "").split())
    assert CLASSES[word].credit and CLASSES[word].credit in credits


def test_the_format_keeps_the_contract(tmp_path: Path) -> None:
    check_format("idx", lambda folder, count: written(folder, *drawn(count)), tmp_path / "files")
