"""Versions that may be installed are those that are tested: pyproject.toml against constraints.txt, and Python."""

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
BY_MINOR = {"ray", "deepspeed", "diffusers", "transformers", "timm", "obstore", "peft"}
# Older ones on which tests of training, data and serving passed: `pip install --no-deps --target DIR ray==...`,
# then `PYTHONPATH=DIR pytest`.
OLDEST = {"ray": Version("2.59.0")}
LANGUAGE = "Programming Language :: Python :: "
PYTHONS = [
    each.removeprefix(LANGUAGE) for each in PROJECT["project"]["classifiers"] if each.startswith(f"{LANGUAGE}3.")
]
"""Versions of Python that the tests have run with, the oldest first."""


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


def test_the_same_pythons_are_spoken_of_everywhere() -> None:
    """Code keeps to the oldest."""
    (_, first), (_, last) = (version.split(".") for version in (PYTHONS[0], PYTHONS[-1]))
    assert sys.version_info[0] == 3 and int(first) <= sys.version_info[1] <= int(last)
    assert [f"3.{minor}" for minor in range(int(first), int(last) + 1)] == PYTHONS
    for project in (PROJECT, STUDY):
        assert project["project"]["requires-python"] == f">=3.{first},<3.{int(last) + 1}"
    assert PROJECT["tool"]["mypy"]["python_version"] == PYTHONS[0]
    assert PROJECT["tool"]["ruff"]["target-version"] == f"py3{first}"
    makefile = (ROOT / "Makefile").read_text()
    assert f"(3, {first}) <= v <= (3, {last})" in makefile and f"needs Python 3.{first} to 3.{last}," in makefile
    assert f"Python 3.{first} to 3.{last}" in (ROOT / "CONTRIBUTING.md").read_text()


def test_machines_that_are_made_have_one_python() -> None:
    """Those of a Ray cluster need the same one, and so do islands that exchange versions."""
    assert f"FROM python:{PYTHONS[0]}-slim\n" in (ROOT / "Dockerfile").read_text()
    for name in ("aws/cluster.yaml", "skypilot/island.yaml"):
        text = (ROOT / "cluster_configs" / name).read_text()
        assert re.findall(r"--python (\S+)", text) == [PYTHONS[0]], name
