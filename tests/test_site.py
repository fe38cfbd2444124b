"""The site of docs/ is built as `make docs` does it: strictly, and without anything from a network."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ddm_ray.cli import main
from tests.conftest import ROOT

pytestmark = pytest.mark.contract
# Where a proxy is named that isn't there, whatever asks a network fails.
OFFLINE = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
FETCHED = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=\"?(?:https?:)?//[^>]*>")


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(config), "--site-dir", str(site)]
    environment = {**os.environ, **OFFLINE, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = build(ROOT / "mkdocs.yml", folder)
    assert built.returncode == 0, built.stderr[-3000:]
    return folder


def test_each_page_is_built(site: Path) -> None:
    pages = [page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")]
    built = [site / (page.parent if page.stem == "index" else page.with_suffix("")) / "index.html" for page in pages]
    assert len(pages) > 30 and [page for page in built if not page.is_file()] == []


def test_no_page_fetches_anything_from_elsewhere(site: Path) -> None:
    assert {fetched for page in site.rglob("*.html") for fetched in FETCHED.findall(page.read_text())} == set()
    assert FETCHED.search('<link rel=stylesheet href="https://fonts.googleapis.com/css">')


def test_commands_formulas_and_types_are_on_their_pages(site: Path) -> None:
    commands = (site / "reference/cli/index.html").read_text()
    assert [verb for verb in main.commands if f'id="ddm-{verb}"' not in commands] == []
    assert "\x08" not in commands and "ddm recipes show photos-cpu &gt; mine.yaml      to change" in commands
    mixture = (site / "concepts/mixture/index.html").read_text()
    assert mixture.count('<svg class="formula"') > 40 and 'class="arithmatex"' not in mixture
    assert 'id="ddm_ray.pipeline.DDMPipeline.from_run"' in (site / "reference/python/index.html").read_text()


def test_a_link_to_a_file_of_the_repository_leads_there(site: Path) -> None:
    repository = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["extra"]["repository"]
    assert f'href="{repository}/blob/main/study/science.py"' in (site / "study/science/index.html").read_text()


@pytest.mark.parametrize(
    ("page", "warning"),
    [
        ("[a](other.md)", "'other.md' is not found"),
        ("[a](#nothing)", "there is no such anchor"),
        ("[a](../cluster_configs/nothing.yaml)", "index.md: no file cluster_configs/nothing.yaml"),
        (r"$\nothing$", r"index.md: \nothing: "),
        ("::: mkdocs-click\n    :module: ddm_ray.cli\n    :command: nothing", "nothing"),
    ],
)
def test_what_is_broken_ends_the_build(page: str, warning: str, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text(f"# A page\n\n{page}\n")
    hooks = [str(ROOT / hook) for hook in yaml.safe_load((ROOT / "mkdocs.yml").read_text())["hooks"]]
    config = {"INHERIT": str(ROOT / "mkdocs.yml"), "docs_dir": "docs", "nav": [{"Home": "index.md"}], "hooks": hooks}
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(config | {"plugins": [], "extra_css": []}))
    (tmp_path / "cluster_configs").mkdir()
    built = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert built.returncode != 0 and warning in built.stderr, built.stderr[-3000:]
