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


def one_page(text: str, folder: Path, **settings: object) -> subprocess.CompletedProcess[str]:
    """A build of one page, with the settings and hooks of the site."""
    (folder / "docs").mkdir()
    (folder / "docs/index.md").write_text(text)
    (folder / "LICENSE").write_text("free")
    hooks = [str(ROOT / hook) for hook in yaml.safe_load((ROOT / "mkdocs.yml").read_text())["hooks"]]
    config = {"INHERIT": str(ROOT / "mkdocs.yml"), "docs_dir": "docs", "nav": [{"Home": "index.md"}], "hooks": hooks}
    (folder / "mkdocs.yml").write_text(yaml.safe_dump(config | {"plugins": [], "extra_css": []} | settings))
    return build(folder / "mkdocs.yml", folder / "site")


def test_a_link_to_a_file_of_the_repository_leads_there(tmp_path: Path) -> None:
    page = "# A page\n\n[free](../LICENSE) and `[code](../LICENSE)`\n"
    built = one_page(page, tmp_path, extra={"repository": "https://example.org/ddm"})
    assert built.returncode == 0, built.stderr
    shown = (tmp_path / "site/index.html").read_text()
    assert '<a href="https://example.org/ddm/blob/main/LICENSE">free</a>' in shown and "[code](../LICENSE)" in shown


def test_without_an_address_the_file_is_named(site: Path) -> None:
    text = " ".join((site / "study/science/index.html").read_text().split())
    assert "<code>study/science.py</code> trains everything" in text
    assert "(<code>tests/islands/test_isolation.py</code>)" in text


def test_what_is_broken_ends_the_build(tmp_path: Path) -> None:
    page = "# A page\n\n[a](other.md) [b](#nothing) [c](../nothing.yaml) $\\nothing$\n"
    built = one_page(page, tmp_path)
    assert built.returncode != 0
    for warning in ("'other.md'", "'#nothing'", "index.md: no file nothing.yaml", r"index.md: \nothing: "):
        assert warning in built.stderr, built.stderr[-3000:]
