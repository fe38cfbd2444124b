"""Records of shards' files that are written: what they tell a partition that goes on, and which of them count."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from ddm_ray.data.partition.file_plan import FilePlan
from ddm_ray.data.partition.made_files import FOLDER, MadeFile, MadeFiles
from ddm_ray.data.partition.state import ExpectedShard
from ddm_ray.data.partition.tally import Tally
from ddm_ray.data.schema import TRAIN
from ddm_ray.run.graph import PARTITION, ROWS, shard
from ddm_ray.run.manifest import FileRecord
from ddm_ray.run.run import Run
from tests.data.groups import FOUR, rows, run_of

CENTROIDS, FILE_BYTES = "c" * 16, 4000


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return run_of(str(tmp_path / "run"), rows(num_rows=200), *FOUR)


@pytest.fixture
def plan(run: Run) -> FilePlan:
    return FilePlan(run.config.data, np.full(4, 90), np.full(4, 10), range(4), FILE_BYTES)


def write(run: Run, plan: FilePlan, place: int) -> MadeFile:
    """A file of the plan and its record, of so many rows as its place is."""
    file, tally = plan.files[place], Tally.none(run.config.data)
    table = rows(num_rows=place + 1).table(run.config)
    tally.add(table)
    data = bytes([place]) * (100 + place)
    run.store.write(f"{shard(file.cluster)}/{file.name(run.config.changes.generation)}", data)
    made = MadeFile(file, FileRecord.of(data), table.num_rows, tally)
    made_files(run).put(made)
    return made


def made_files(run: Run, centroids: str = CENTROIDS, file_bytes: int = FILE_BYTES) -> MadeFiles:
    expected = {
        cluster: ExpectedShard(run, cluster, centroids, run.identity(PARTITION), (run, ROWS)) for cluster in range(4)
    }
    return MadeFiles(run, expected, file_bytes)


def recorded_files(files: MadeFiles, plan: FilePlan) -> dict[int, MadeFile]:
    return {made.file.place: made for made in files.find(plan.files)}


def test_what_is_recorded_is_found_again(run: Run, plan: FilePlan) -> None:
    made = {place: write(run, plan, place) for place in (1, 4, len(plan.files) - 1)}
    files = pickle.loads(pickle.dumps(made_files(run)))
    recorded = recorded_files(files, plan)
    assert recorded.keys() == made.keys()
    for place, each in recorded.items():
        assert (each.file, each.record, each.rows) == (made[place].file, made[place].record, made[place].rows)
        assert (each.tally.values_V == made[place].tally.values_V).all() and each.tally.values_V.any()
        assert (each.tally.counts_C == made[place].tally.counts_C).all() and each.tally.counts_C.sum() == place + 1
    files.clear()
    assert not recorded_files(files, plan) and not run.store.sizes(FOLDER)


@pytest.mark.parametrize("what", ["centroids", "plan", "rows"])
def test_records_of_another_partition_do_not_count(what: str, run: Run, plan: FilePlan, tmp_path: Path) -> None:
    write(run, plan, 0)
    if what == "rows":
        other = run_of(str(tmp_path / "other"), rows(num_rows=201), *FOUR)
        (tmp_path / "other" / PARTITION).symlink_to(tmp_path / "run" / PARTITION)
        assert not recorded_files(made_files(other), plan)
    centroids, size = ("d" * 16, FILE_BYTES) if what == "centroids" else (CENTROIDS, FILE_BYTES + (what == "plan"))
    assert bool(recorded_files(made_files(run, centroids, size), plan)) == (what == "rows")


@pytest.mark.parametrize("damage", ["torn record", "altered record", "file gone", "file cut short"])
def test_damage_has_a_file_made_again(damage: str, run: Run, plan: FilePlan) -> None:
    made, other = write(run, plan, 0), write(run, plan, 2)
    [key, _] = (f"{FOLDER}/{name}" for name in run.store.sizes(FOLDER))
    file = f"{shard(made.file.cluster)}/{made.file.name(run.config.changes.generation)}"
    assert made.file.split == TRAIN and "000000-train-000000" in key
    data = run.store.read(key)
    if damage == "torn record":
        run.store.write(key, data[:-30])
    elif damage == "altered record":
        run.store.write(key, data.replace(b'"rows":1', b'"rows":2'))
        assert run.store.read(key) != data
    elif damage == "file gone":
        run.store.delete_one(file)
    else:
        run.store.write(file, run.store.read(file)[:-1])
    assert recorded_files(made_files(run), plan).keys() == {other.file.place}
