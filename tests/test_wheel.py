"""The wheel: all that the package reads is in it and no test is, and what it installs runs by itself."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.contract

READ_AT_RUN_TIME = ("py.typed", "recipes/*.yaml", "pictures/templates/*", "serve/http/page/*")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree, built in a copy of it."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in ("ddm_ray", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run(
        [*command, "--wheel-dir", folder / "out", folder], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = (folder / "out").glob("*.whl")
    return built


def test_it_has_what_the_package_reads_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    read = {f"ddm_ray/{path.relative_to(ROOT / 'ddm_ray')}" for each in READ_AT_RUN_TIME for path in files_of(each)}
    code = {str(path.relative_to(ROOT)) for path in (ROOT / "ddm_ray").rglob("*.py")}
    assert len(read) > 10 and names == read | code


def files_of(pattern: str) -> list[Path]:
    return [path for path in (ROOT / "ddm_ray").glob(pattern) if path.is_file()]


def test_what_it_installs_runs_by_itself(wheel: Path, tmp_path: Path) -> None:
    """In an environment of its own, whose libraries are these; its code is the wheel's."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    pip = [sys.executable, "-m", "pip", "--python", tmp_path / "venv/bin/python", "install"]
    # With a PYTHONPATH, pip would take the tree's own editable installation for this one.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    install = [*pip, "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(install, env=environment, check=True, capture_output=True)
    (site / "libraries.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")

    def ran(*words: str) -> str:
        command = [str(tmp_path / "venv/bin" / words[0]), *words[1:]]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert ran("python", "-c", "import ddm_ray; print(ddm_ray.__file__)") == f"{site / 'ddm_ray/__init__.py'}\n"
    assert "ddm serve" in ran("ddm", "serve", "--help")
    assert re.search(r"^ *photos-cpu ", ran("ddm", "recipes"), re.MULTILINE)
    assert "next: ddm prepare run" in ran("ddm", "init", "run", "--recipe", "digits")


def test_the_shell_completes(tmp_path: Path) -> None:
    """As click does it: `eval "$(_DDM_COMPLETE=bash_source ddm)"`."""
    ddm = str(Path(sys.executable).parent / "ddm")
    script = subprocess.run([ddm], env={"_DDM_COMPLETE": "bash_source"}, capture_output=True, text=True, check=True)
    assert "_ddm_completion" in script.stdout
    asked = {"_DDM_COMPLETE": "bash_complete", "COMP_WORDS": "ddm par", "COMP_CWORD": "1"}
    verbs = subprocess.run([ddm], env=asked, capture_output=True, text=True, check=True)
    assert verbs.stdout == "plain,partition\n"
