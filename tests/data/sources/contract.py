"""A contract that every source and every format of files keeps, also those of other packages."""

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from ddm_ray.config import DataConfig
from ddm_ray.data.sources import Encoded, Source, open_source
from ddm_ray.data.sources.collection import Collection, format_named
from ddm_ray.data.sources.registry import SOURCES
from ddm_ray.errors import DataError
from tests.data.sources.test_sources import everything

CONFIG = DataConfig(num_classes=100, channels=3, image_size=16)
ROWS = 300


def check_named(word: str) -> None:
    """A source that a word names lists, reads, goes on and counts, and refuses a number that it can't have."""
    kind = SOURCES[word]
    assert {form.partition(":")[0] for form in kind.forms} == {word}
    opened = [open_source(CONFIG, form.replace("NUMBER", "250"), chunk_rows=100) for form in kind.forms]
    assert all(source.list().units for source in opened)
    check_rows(opened[-1])
    assert is_a_line(kind.about)
    for bad in (f"{word}:none", f"{word}:0"):
        with pytest.raises(DataError, match=f"^data.source '{bad}': {word}") as refused:
            open_source(CONFIG, bad)
        assert is_a_line(str(refused.value))


def check_format(name: str, write: Callable[[Path, int], object], folder: Path) -> None:
    """The same of a format, of whose files `write` makes some of so many images; and of what is cut off."""
    write(folder, ROWS)
    chosen = format_named(name)
    assert is_a_line(chosen.about) and is_a_line(chosen.plural)
    for config in (CONFIG, CONFIG.model_copy(update={"format": name})):
        source = open_source(config, str(folder), chunk_rows=100)
        rows = check_rows(source)
        assert len(rows) == ROWS and {row.condition for row in rows} == {0, 1, 2}
        assert isinstance(source, Collection)
        counts = [chosen.count(source, unit) for unit in source.list().units]
        assert None in counts or sum(filter(None, counts)) == ROWS
    files = [path for path in folder.rglob("*") if path.is_file()]
    for path in files:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    try:
        lines = [row.problem for row in everything(open_source(CONFIG, str(folder), chunk_rows=100)) if row.problem]
    except DataError as error:
        lines = [str(error)]
        assert any(path.name in lines[0] for path in files), "the file that is damaged is named"
    assert (lines or chosen.one_image_each) and all(map(is_a_line, lines)), "images themselves are decoded later"


def check_rows(source: Source) -> list[Encoded]:
    """All rows of a source, of which none has a problem, however it is listed and read."""
    listing = source.list()
    assert source.list() == listing and pickle.loads(pickle.dumps(source)).list() == listing
    assert len({unit.key for unit in listing.units}) == len(listing.units) > 0
    rows = everything(source)
    assert len({row.id for row in rows}) == len(rows) == (len(rows) if listing.rows is None else listing.rows)
    assert not [row.problem for row in rows if row.problem]
    planned = source.planned(100, listing.classes, numbered=listing.numbered)
    first = listing.units[0]
    chunks = list(pickle.loads(pickle.dumps(planned)).read(first))
    assert all(len(chunk.rows) <= 100 for chunk in chunks)
    for skip in ({0}, {len(chunks) - 1}, set(range(len(chunks) - 1)), {1, 3}, set(range(len(chunks)))):
        assert list(planned.read(first, skip)) == [chunk for chunk in chunks if chunk.number not in skip]
    return rows


def is_a_line(text: str) -> bool:
    return bool(text.strip()) and text.isprintable()
