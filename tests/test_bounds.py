"""Versions that may be installed are those that are tested: pyproject.toml against constraints.txt, and one Python."""

import re
import sys
import tomllib
from collections.abc import Iterator

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.conftest import ROOT

PROJECT, STUDY = (tomllib.loads((ROOT / folder / "pyproject.toml").read_text()) for folder in (".", "study"))
PINS = {
    canonicalize_name(name): Version(version)
    for name, _, version in (line.partition("==") for line in (ROOT / "constraints.txt").read_text().split())
}
# Their insides or formats are built upon, and change with each minor version.
BY_MINOR = {"ray", "deepspeed", "diffusers", "transformers", "timm", "obstore"}
# Older ones on which tests of training, data and serving passed: `pip install --no-deps --target DIR ray==...`,
# then `PYTHONPATH=DIR pytest`.
OLDEST = {"ray": Version("2.59.0")}


def requirements() -> Iterator[Requirement]:
    project = PROJECT["project"]
    for text in [
        *project["dependencies"],
        *(each for extra in project["optional-dependencies"].values() for each in extra),
        *STUDY["project"]["dependencies"],
    ]:
        requirement = Requirement(text)
        if requirement.name != project["name"]:
            yield requirement


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_a_library_is_bounded_by_what_was_tested(requirement: Requirement) -> None:
    pin = PINS[canonicalize_name(requirement.name)]
    above = f"{pin.major}.{pin.minor + 1}" if requirement.name in BY_MINOR else f"{pin.major + 1}"
    assert requirement.specifier == SpecifierSet(f">={OLDEST.get(requirement.name, pin)},<{above}")


def test_one_python_is_spoken_of_everywhere() -> None:
    major, minor = sys.version_info[:2]
    assert PROJECT["project"]["requires-python"] == f">={major}.{minor},<{major}.{minor + 1}"
    assert PROJECT["tool"]["mypy"]["python_version"] == f"{major}.{minor}"
    assert PROJECT["tool"]["ruff"]["target-version"] == f"py{major}{minor}"
    makefile = (ROOT / "Makefile").read_text()
    assert f"v == ({major}, {minor})" in makefile and f"needs Python {major}.{minor}," in makefile
    assert f"FROM python:{major}.{minor}-slim\n" in (ROOT / "Dockerfile").read_text()
    for name in ("aws/cluster.yaml", "skypilot/island.yaml"):
        text = (ROOT / "cluster_configs" / name).read_text()
        assert re.findall(r"--python (\S+)", text) == [f"{major}.{minor}"], name
