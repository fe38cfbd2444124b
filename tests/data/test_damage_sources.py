"""Damaged images, tars and parquet files: every row is a row or has a reason, or the file is refused by name."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ddm_ray.config import DataConfig
from ddm_ray.data.prepare.decoding import decode_rows
from ddm_ray.data.sources import Unit, open_source
from tests.data.broken import CLASSES
from tests.data.damage import Damage, Folder, Tally, damages, flipped, images, is_line, write_folder, write_tar

pytestmark = pytest.mark.contract

CHUNK = 16
LEAST = {"folder": 200, "tars": 150, "parquet": 150}


def write_tars(folder: Path) -> None:
    members = [
        (f"{row:04d}", {name.rpartition(".")[2]: data, "cls": str(row % 4).encode()})
        for row, (name, data) in enumerate(images().items())
    ]
    for part in range(2):
        write_tar(folder / f"{part}.tar", members[30 * part : 30 * part + 30])


def write_parquet(folder: Path) -> None:
    rows = [{"image": {"bytes": data, "path": None}, "label": row % 4} for row, data in enumerate(images().values())]
    for part, compression in enumerate(("none", "snappy")):
        table = pa.Table.from_pylist(rows[30 * part : 30 * part + 30])
        pq.write_table(table, folder / f"{part}.parquet", row_group_size=CHUNK, compression=compression)


SOURCES: dict[str, tuple[Callable[[Path], None], tuple[int, int]]] = {
    "folder": (write_folder, (2, 1)),
    "tars": (write_tars, (60, 12)),
    "parquet": (write_parquet, (60, 12)),
}


@pytest.mark.parametrize(
    "kind", ["tars", *(pytest.param(kind, marks=pytest.mark.chaos) for kind in ("folder", "parquet"))]
)
def test_damage_to_a_source(kind: str, tmp_path: Path) -> None:
    write, (flips, cuts) = SOURCES[kind]
    write(tmp_path)
    config = DataConfig(class_names=CLASSES, channels=3, image_size=8)
    units = open_source(config, str(tmp_path), chunk_rows=CHUNK).list().units
    undamaged = rows_of(config, tmp_path, units)
    assert len(undamaged) == 60
    assert not any(isinstance(row, str) for row in undamaged.values())
    folder, generator, tally = Folder(tmp_path), np.random.default_rng(1), Tally()
    # Every third of the images: their formats are 19.
    for key in list(folder.files)[:: 3 if kind == "folder" else 1]:
        for damage in damages(key, folder.files, generator, flips, cuts, swaps=0):
            tally.damages += 1
            # Damaged after it was listed, and before; a file that was gone by then was never there.
            for listed in (units,) if damage.data is None else (units, None):
                with folder.damaged(damage):
                    tally.meet(damage, partial(wrong_rows, damage, undamaged, config, tmp_path, listed), [], [key])
    tally.check(LEAST[kind])


def test_every_second_bit_of_a_parquet_files_footer(tmp_path: Path) -> None:
    """Which rows there are, and so their ids, is told by the footer alone, and nothing there is checked by a sum."""
    table = pa.table({"image": list(images(6).values()), "label": [0, 1, 2, 3, 0, 1]})
    plain = {"use_dictionary": False, "write_statistics": False, "store_schema": False}
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=3, compression="none", **plain)
    config = DataConfig(class_names=CLASSES, channels=3, image_size=8)
    units = open_source(config, str(tmp_path), chunk_rows=CHUNK).list().units
    undamaged, folder, tally = rows_of(config, tmp_path, units), Folder(tmp_path), Tally()
    data = folder.files["a.parquet"]
    for bit in range(8 * (len(data) - 8 - int.from_bytes(data[-8:-4], "little")), 8 * len(data), 2):
        damage = Damage("a.parquet", f"bit {bit} flipped", flipped(data, [bit]))
        tally.damages += 1
        with folder.damaged(damage):
            tally.meet(damage, partial(wrong_rows, damage, undamaged, config, tmp_path, units), [], [damage.key])
    assert tally.refused
    tally.check(1000)


def rows_of(config: DataConfig, folder: Path, units: list[Unit] | None) -> dict[str, Any]:
    """Every row of a source by its id: its content and condition, or the reason why it can't be used."""
    source = open_source(config, str(folder), chunk_rows=CHUNK)
    outcomes: list[tuple[str, Any]] = []
    for unit in units or source.list().units:
        for chunk in source.read(unit):
            rows = decode_rows(chunk.rows, config)
            outcomes += zip(rows.ids, zip(rows.content_hashes, rows.conditions, strict=True), strict=True)
            outcomes += ((row["id"], row["reason"]) for row in rows.rejected)
    assert len(outcomes) == len(dict(outcomes)), "an id comes twice"
    return dict(outcomes)


def wrong_rows(
    damage: Damage, undamaged: dict[str, Any], config: DataConfig, folder: Path, units: list[Unit] | None
) -> list[str]:
    """Rows that are neither as they were, nor of the damaged file and a row or a reason; reasons may stand for many."""
    outcomes = rows_of(config, folder, units)
    wrong = []
    for row_id in undamaged.keys() | outcomes.keys():
        mine, row = row_id.startswith(damage.key), outcomes.get(row_id)
        if row is None and mine and "tar ends early or is damaged" in outcomes.get(f"{damage.key}/….end", ""):
            continue
        known = row_id in undamaged or is_line(row)
        if (
            row is None
            or not known
            or (isinstance(row, str) and not is_line(row))
            or (not mine and row != undamaged[row_id])
        ):
            wrong.append(row_id)
    return wrong
