"""Files for people and tools around the project: what they name exists, and all of them name the same version."""

import re
import sys
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

import ddm_ray
from ddm_ray.cli import main
from ddm_ray.cli.command import MAIN_LIBRARIES
from tests.conftest import ROOT
from tests.test_bounds import PINS, PYTHONS


def read(name: str) -> str:
    return (ROOT / name).read_text()


def test_the_version_is_one() -> None:
    heading = r"^## \[(?P<version>[\d.]+)\] - (?:unreleased|\d{4}-\d\d-\d\d)$"
    assert (newest := re.search(heading, read("CHANGELOG.md"), re.MULTILINE))
    assert newest["version"] == yaml.safe_load(read("CITATION.cff"))["version"] == ddm_ray.__version__


def test_the_version_is_printed_with_those_of_libraries() -> None:
    done = CliRunner().invoke(main, ["--version"])
    first, python, *libraries = done.stdout.splitlines()
    assert first == f"ddm, version {ddm_ray.__version__}"
    assert python.split() == ["python", sys.version.split()[0]]
    assert libraries == [f"{name} {metadata.version(name)}" for name in MAIN_LIBRARIES]
    assert {*MAIN_LIBRARIES} <= PINS.keys(), "a library is spelled as its package is"


def test_a_library_that_is_absent_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    version = metadata.version

    def without_ray(name: str) -> str:
        if name == "ray":
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", without_ray)
    done = CliRunner().invoke(main, ["--version"])
    assert done.exit_code == 0
    assert "torch" in done.stdout and "ray 2" not in done.stdout


def test_hooks_are_the_linters_of_the_environment() -> None:
    """A hook from elsewhere would have a version of its own."""
    repos = yaml.safe_load(read(".pre-commit-config.yaml"))["repos"]
    assert [repo["repo"] for repo in repos] == ["local"]
    commands = [Path(hook["entry"].split()[0]) for hook in repos[0]["hooks"]]
    assert {command.parent for command in commands} == {Path(".venv/bin")}
    assert {command.name for command in commands} == {"ruff", "mypy"} <= PINS.keys()


def test_the_workflow_runs_what_is_run_elsewhere() -> None:
    job = yaml.safe_load(read(".github/workflows/ci.yml"))["jobs"]["run"]
    runs = [step["run"] for step in job["steps"] if "run" in step]
    assert runs == [".ci/run"]
    assert (ROOT / runs[0]).is_file()
    assert {*job["strategy"]["matrix"]["python"]} <= {*PYTHONS}


@pytest.mark.parametrize("page", ["CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", ".github/PULL_REQUEST_TEMPLATE.md"])
def test_links_of_pages_outside_of_the_site_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)", read(page))
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []
