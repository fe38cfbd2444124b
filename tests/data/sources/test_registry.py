"""Every source and format keeps the contract; a package of a user's adds one, which is then known everywhere."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from ddm_ray.cli import main
from ddm_ray.cli.recipes import page
from ddm_ray.config import DataConfig, load_recipe
from ddm_ray.data.prepare.stage import prepare
from ddm_ray.data.sharded.serial import serial
from ddm_ray.data.sources import absolute_name, collection, open_source
from ddm_ray.data.sources.registry import FORMATS, SOURCES
from ddm_ray.errors import ConfigError, DataError
from ddm_ray.run.info import RowsInfo
from ddm_ray.run.run import Run
from tests.data.sources.contract import check_format, check_named, is_a_line
from tests.data.sources.test_sources import WRITERS

pytestmark = pytest.mark.contract

STRIPES = """
import io
from dataclasses import dataclass

import numpy as np
from ddm_ray.data.sources.chunks import Encoded, Listing, Unit, chunked
from ddm_ray.data.sources.collection import Format
from ddm_ray.data.sources.named import NamedSource


def pixels(index):
    return np.full((8, 8), index % 256, np.uint8)


@dataclass(frozen=True)
class Stripes(NamedSource):
    forms = ("stripes", "stripes:NUMBER")
    about = "pictures of one grey each"

    count: int = 20

    def list(self):
        return Listing((Unit("all", 64 * self.count),), rows=self.count)

    def read(self, unit, skip=()):
        rows = (self.encoded(f"stripes/{index}", pixels(index), index % 3) for index in range(self.count))
        return chunked(((row, (place + 1) / self.count) for place, row in enumerate(rows)), self.chunk_rows, skip)


class Npy(Format):
    plural = "arrays"
    about = "NumPy's arrays of grey images"
    extensions = frozenset({"npy"})

    def count(self, source, unit):
        return len(self._load(source, unit))

    def read(self, source, unit, skip):
        rows = Stripes(source.conditions, 1)
        many = self._load(source, unit)
        encoded = (rows.encoded(f"{unit.key}/{place}", each, place % 3) for place, each in enumerate(many))
        return chunked(((row, (place + 1) / len(many)) for place, row in enumerate(encoded)), source.chunk_rows, skip)

    def _load(self, source, unit):
        (path,), (size,) = unit.files, unit.sizes
        source.files.check(path, size)
        try:
            return np.load(io.BytesIO(source.files.read(path, size)))
        except ValueError as error:
            from ddm_ray.errors import DataError

            raise DataError(f"{source.files.where(path)}: {error}") from None
"""
ENTRIES = "[ddm_ray.sources]\nstripes = stripes_of_mine:Stripes\n[ddm_ray.formats]\nnpy = stripes_of_mine:Npy\n"
Install = Callable[[str, str], None]


@pytest.mark.parametrize("word", SOURCES.ours)
def test_a_named_source_keeps_the_contract(word: str) -> None:
    check_named(word)


@pytest.mark.parametrize("name", FORMATS.ours)
def test_a_format_keeps_the_contract(name: str, tmp_path: Path) -> None:
    check_format(name, WRITERS[name], tmp_path / "files")


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a package of one module, as pip does: its code, and its metadata beside it."""

    def forget() -> None:
        for registry in (SOURCES, FORMATS):
            vars(registry).pop("_others", None)
        collection.format_named.cache_clear()

    def add(name: str, entries: str, code: str = STRIPES) -> None:
        site = tmp_path / name
        metadata = site / f"{name}-1.0.dist-info"
        metadata.mkdir(parents=True)
        (site / f"{name}.py").write_text(code)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(entries)
        monkeypatch.syspath_prepend(str(site))
        monkeypatch.delitem(sys.modules, name, raising=False)
        forget()

    forget()
    yield add
    forget()


def ddm(*words: str) -> str:
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


def test_a_package_adds_a_source_and_a_format_that_are_known_everywhere(install: Install, tmp_path: Path) -> None:
    install("stripes_of_mine", ENTRIES)
    import numpy as np

    def write(folder: Path, count: int) -> None:
        folder.mkdir()
        np.save(folder / "images.npy", np.full((count, 8, 8), 7, np.uint8))

    check_named("stripes")
    check_format("npy", write, tmp_path / "arrays")
    for shown in (ddm("fields", "data."), ddm("init", "--help")):
        assert "stripes or stripes:NUMBER" in shown and "NumPy's arrays of grey images" in shown
    assert "stripes" not in page(), "the page is of what ships"
    assert absolute_name("stripes:7") == "stripes:7" and absolute_name("stripe") != "stripe"
    with pytest.raises(DataError, match=r"stripes or stripes:NUMBER; did you mean stripes\?$"):
        open_source(DataConfig(num_classes=3), "stripe").list()
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match=r"there are no images, tars, .* or arrays$"):
        open_source(DataConfig(num_classes=3), str(tmp_path / "none")).list()
    settings = ("data.source=stripes:60", "data.num_classes=3", "embedder.dim=2", "partition.num_fine=2")
    run = Run.create(str(tmp_path / "run"), load_recipe("tiny", settings))
    info = RowsInfo.of(prepare(run, execute=serial))
    assert (info.rows, info.source) == (60, "stripes:60")


def test_a_package_that_cannot_be_imported_is_named_and_hides_no_other(install: Install) -> None:
    install("broken", "[ddm_ray.sources]\nstripes = broken:Stripes\n", "import no_such_module\n")
    with pytest.raises(
        DataError, match=r"^stripes: broken:Stripes, of the package broken, can't .*no_such_module"
    ) as no:
        open_source(DataConfig(num_classes=3), "stripes")
    assert is_a_line(str(no.value)) and "uninstall it" in str(no.value)
    assert open_source(DataConfig(num_classes=10), "digits").list().rows == 1797


def test_no_name_is_taken_twice(install: Install) -> None:
    install("first", "[ddm_ray.sources]\ndigits = first:Stripes\n")
    with pytest.raises(DataError, match=r"^'digits' in ddm_ray.sources is registered twice, by ddm-ray and first; uni"):
        open_source(DataConfig(num_classes=3), "stripes")
    assert open_source(DataConfig(num_classes=10), "digits").list().rows == 1797


@pytest.mark.parametrize("source", ["os:system", "stripes_of_mine:Stripes", "../stripes_of_mine", "digits:Digits"])
def test_a_configuration_imports_nothing_that_is_not_registered(source: str, install: Install) -> None:
    install("stripes_of_mine", "", "raise SystemExit('imported')\n")
    with pytest.raises(DataError, match=r"^data.source "):
        open_source(DataConfig(num_classes=10), source).list()


@pytest.mark.parametrize("source", ["domains", "domains:500", "patches:7000", "emoji"])
def test_a_source_that_was_ours_is_refused_with_the_package_that_has_it(
    source: str, install: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("ddm_ray.data.sources.registry.entry_points", lambda group: ())
    run = Run.create(str(tmp_path / "run"), load_recipe("tiny", (f"data.source={source}", "data.num_classes=16")))
    opened = Run.open(run.url)
    with pytest.raises(
        DataError, match=f"^data.source '{source}' is of the package ddm-ray-study, .*: pip install"
    ) as no:
        prepare(opened, execute=serial)
    assert is_a_line(str(no.value)) and str(no.value).endswith(f"a folder of that name is ./{source.split(':')[0]}")
    with pytest.raises(ConfigError, match=r"^data.format 'idx' is of the package ddm-ray-study, .*: pip install"):
        open_source(DataConfig(num_classes=3, format="idx"), str(tmp_path))


def test_a_format_that_there_is_not_is_refused_before_anything_is_listed() -> None:
    with pytest.raises(ConfigError, match=r"^data.format 'parket' is none of folder, .*; did you mean parquet"):
        open_source(DataConfig(num_classes=3, format="parket"), "s3://bucket/prefix")
