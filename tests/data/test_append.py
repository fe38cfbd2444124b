"""Appended files are prepared alone and go to the clusters that there are; the run that they join stays as it is."""

import os
from pathlib import Path
from shutil import copytree, ignore_patterns

import numpy as np
import pytest
import torch
from safetensors.numpy import load

from ddm_ray.config import load_recipe
from ddm_ray.data.loading.heldout_rows import heldout_rows
from ddm_ray.data.loading.loader import load_rows
from ddm_ray.data.partition.stage import partition
from ddm_ray.data.prepare.stage import prepare
from ddm_ray.data.schema import HELDOUT, embeddings
from ddm_ray.data.sharded.serial import serial
from ddm_ray.errors import ConfigError, DataError, DriftError, MissingArtifact, StorageError
from ddm_ray.jobs.attempts import claim
from ddm_ray.jobs.examination import examine
from ddm_ray.jobs.mending import delete_records, mending
from ddm_ray.jobs.published import Weights
from ddm_ray.remedies import Mend
from ddm_ray.run.base import derived_from
from ddm_ray.run.chunk_records import PLAN
from ddm_ray.run.garbage import leftovers
from ddm_ray.run.graph import CENTROIDS, PARTITION, REPORT, ROUTER, ROWS, expert, shard
from ddm_ray.run.info import PartitionInfo, ReportInfo, RowsInfo
from ddm_ray.run.manifest import NAME
from ddm_ray.run.run import RUN_FILE, Run
from ddm_ray.sampling.run_models import load_network
from ddm_ray.train.job import train_job
from ddm_ray.train.teachers import first_model
from tests.data.appended import make_base, make_data, sums, write_digits
from tests.data.rows import read_artifact
from tests.derived import append, extend
from tests.random_run import publish_models
from tests.run.artifacts import flip_bit, save_state

pytestmark = pytest.mark.contract

STEPS = {"expert": 20}


def test_a_damaged_file_is_mended_in_the_run_that_has_it(tmp_path: Path) -> None:
    base = make_base(tmp_path)
    write_digits(tmp_path / "photos", range(200, 260))
    run = append(base, STEPS).run
    make_data(run)
    assert not any(finding.error for finding in examine(run, deep=True))
    own, earlier = (min((Path(each.url) / shard(0)).glob("train-*")) for each in (run, base))
    data = earlier.read_bytes()
    flip_bit(earlier)
    [finding] = [finding for finding in examine(run, deep=True) if finding.error]
    assert str(finding.error).startswith(f"{earlier}: checksum differs")
    assert finding.error and finding.error.fix == Mend(base.url, shard(0))
    assert mending(run, finding, deep=True) is None
    earlier.write_bytes(data)
    data = own.read_bytes()
    flip_bit(own)
    [finding] = [finding for finding in examine(run, deep=True) if finding.error]
    mended = mending(run, finding, deep=True)
    assert mended and delete_records(run, mended, deep=True)
    make_data(run)
    assert own.read_bytes() == data and not any(finding.error for finding in examine(run, deep=True))


def ids_of(run: Run, cluster: int) -> set[str]:
    return set(read_artifact(run, shard(cluster), ["id"])["id"].to_pylist())


def test_new_files_join_the_shards_and_nothing_of_the_run_changes(tmp_path: Path) -> None:
    base = make_base(tmp_path)
    before = sums(base)
    ids = write_digits(tmp_path / "photos", range(200, 260))
    appending = append(base, STEPS)
    run = appending.run
    assert derived_from(base.store) == [run.url]
    assert sorted(appending.new.files) == sorted(ids)
    make_data(run)
    assert sums(base) == before

    rows = read_artifact(run, ROWS)
    assert sorted(rows["id"].to_pylist()) == sorted(ids)
    data, centroids = run.config.partition, load(run.read(CENTROIDS, next(iter(run.require(CENTROIDS).files))))
    distance_NK = np.linalg.norm(embeddings(rows)[:, None] - centroids["coarse_KD"], axis=2)
    placed = dict(zip(rows["id"].to_pylist(), distance_NK.argmin(axis=1).tolist(), strict=True))
    for cluster in range(data.num_clusters):
        assert ids_of(run, cluster) == ids_of(base, cluster) | {each for each in ids if placed[each] == cluster}
        own = run.require(shard(cluster)).files
        assert base.require(shard(cluster)).files.items() <= own.items()
        assert not {*base.require(shard(cluster)).files} & set(os.listdir(Path(run.url) / shard(cluster)))
    # One who prepares everything at once holds the same rows out, with the same data.
    at_once = Run.create(str(tmp_path / "at_once"), base.config)
    prepare(at_once, execute=serial)
    expected = read_artifact(at_once, ROWS, ["id", "data", "label", "split"])
    both = [read_artifact(each, ROWS, ["id", "data", "label", "split"]).to_pylist() for each in (base, run)]
    assert sorted(both[0] + both[1], key=lambda row: row["id"]) == expected.sort_by("id").to_pylist()
    info = PartitionInfo.of(run.require(PARTITION))
    assert sum(info.rows_K) + sum(info.rows_heldout_K) == 260
    held = load_rows(run, [shard(0)], HELDOUT)
    assert {*held.ids} == {row["id"] for row in both[0] + both[1] if row["split"] == HELDOUT} & ids_of(run, 0)
    again = prepare(run, execute=serial), partition(run)
    assert again == (run.require(ROWS), run.require(PARTITION))
    assert not [each for each in leftovers(base) if each.artifact != "monolith"]


def test_paths_of_another_source_are_named_not_called_changed(tmp_path: Path) -> None:
    base = make_base(tmp_path)
    known = write_digits(tmp_path / "later", range(0, 3), inverted=True)
    ids = write_digits(tmp_path / "later", range(200, 230))
    new = append(base, STEPS, str(tmp_path / "later")).new
    assert (sorted(new.files), sorted(new.elsewhere), new.changed, new.gone) == (sorted(ids), sorted(known), (), ())


def test_rows_that_are_measured_while_training_are_of_each_generation(tmp_path: Path) -> None:
    base = make_base(tmp_path, num_rows=300)
    write_digits(tmp_path / "photos", range(300, 600))
    run = append(base, STEPS).run
    make_data(run)
    artifacts = [shard(cluster) for cluster in range(run.config.partition.num_clusters)]
    most = 20
    measured = heldout_rows(run, artifacts, most, None)
    of_base = heldout_rows(base, artifacts, 1000, None)
    assert measured.num_rows == most
    old = {row.tobytes() for row in of_base.modelled()}
    count = sum(row.tobytes() in old for row in measured.modelled())
    total = sum(PartitionInfo.of(run.require(PARTITION)).rows_heldout_K)
    assert abs(count - most * of_base.num_rows / total) <= len(artifacts) and count < most
    everything = heldout_rows(run, artifacts, 1000, None)
    assert everything.num_rows == total and old < {row.tobytes() for row in everything.modelled()}


def test_files_that_came_after_a_kill_are_not_taken_for_those_that_were_appended(tmp_path: Path) -> None:
    base = make_base(tmp_path)
    write_digits(tmp_path / "photos", range(200, 230))
    run = append(base, STEPS).run
    run.store.delete("rows")  # as a kill between run.json and the plan leaves it
    write_digits(tmp_path / "photos", range(230, 240))
    with pytest.raises(DriftError, match=r"begun with 30 new files, and .* has 40 others by now; delete it"):
        prepare(run, execute=serial)


def test_untrained_weights_are_missed_before_anything_is_written(tmp_path: Path) -> None:
    base = make_base(tmp_path, trained=False)
    write_digits(tmp_path / "photos", range(200, 230))
    with pytest.raises(MissingArtifact):
        append(base, STEPS)
    assert derived_from(base.store) == [] and [path.name for path in tmp_path.iterdir()].count("run") == 1


def test_the_report_warns_of_new_rows_that_are_unlike(tmp_path: Path) -> None:
    base = make_base(tmp_path)
    write_digits(tmp_path / "photos", range(200, 260))
    run = append(base, STEPS).run
    make_data(run)
    assert not any("unlike" in line for line in ReportInfo.of(run.require(REPORT)).warnings)
    assert b"farther than 99 % of the earlier" in run.read(REPORT, "report.html")
    assert "fit" not in base.require(REPORT).info
    write_digits(tmp_path / "negatives", range(300, 330), inverted=True)
    strange = append(base, STEPS, str(tmp_path / "negatives")).run
    make_data(strange)
    [line] = [line for line in ReportInfo.of(strange.require(REPORT)).warnings if "unlike" in line]
    assert "begin a new run" in line


def test_experts_and_router_begin_with_the_weights_to_the_bit(tmp_path: Path) -> None:
    base = make_base(tmp_path)
    write_digits(tmp_path / "photos", range(200, 230))
    run = append(base, STEPS).run
    make_data(run)
    assert run.config.expert.train.steps == 20 and run.config.router.train.steps == 300
    for job in (*run.experts, ROUTER):
        first = first_model(run, train_job(run, job)).state_dict()
        trained = load_network(base, Weights.finished(base, job)).state_dict()
        assert first.keys() == trained.keys() and all(torch.equal(first[name], trained[name]) for name in first)
        assert run.predecessors(job) == ()
        assert run.identity(job).fingerprint != base.identity(job).fingerprint


def test_what_is_appended_can_be_appended_to_and_extended(tmp_path: Path) -> None:
    base = make_base(tmp_path)
    write_digits(tmp_path / "photos", range(200, 230))
    first = append(base, STEPS).run
    make_data(first)
    write_digits(tmp_path / "photos", range(230, 250))
    with pytest.raises(MissingArtifact, match=r"expert\.train\.init_from: .*experts/000"):
        append(first, STEPS)
    publish_models(first)
    before = sums(base), sums(first)
    appending = append(first, STEPS)
    assert len(appending.new.files) == 20
    second = appending.run
    make_data(second)
    assert second.config.changes.generation == 2 and (sums(base), sums(first)) == before
    assert len(ids_of(second, 0)) + len(ids_of(second, 1)) == 250
    with pytest.raises(DataError, match="has no file that isn't in"):
        append(second, STEPS)
    publish_models(second)
    for job in second.experts:
        save_state(claim(second.store, job), 20, second.identity(job), {"rank-000/a": b"state"}, keep=2)
    longer = extend(second, "expert.train.steps=30")
    assert [ids_of(longer, cluster) for cluster in (0, 1)] == [ids_of(second, cluster) for cluster in (0, 1)]
    assert [each.url for each in longer.predecessors(expert(0))] == [second.url]
    write_digits(tmp_path / "photos", range(250, 255))
    publish_models(longer)
    before = sums(second)
    third = append(longer, STEPS)
    make_data(third.run)
    assert len(third.new.files) == 5 and len(ids_of(third.run, 0)) + len(ids_of(third.run, 1)) == 255
    assert sums(second) == before and third.run.config.changes.generation == 3


def test_a_killed_command_is_finished_by_the_same_one(tmp_path: Path) -> None:
    base = make_base(tmp_path)
    write_digits(tmp_path / "photos", range(200, 230))
    run = append(base, STEPS).run
    made = sums(run)
    for gone in (RUN_FILE, f"{ROWS}/{PLAN}", f"beginnings/router/{NAME}"):
        (Path(run.url) / gone).unlink()
        assert append(base, STEPS).run.url == run.url and sums(run) == made
    assert append(base, {"expert": 30}).run.url != run.url
    [later] = write_digits(tmp_path / "photos", range(230, 231))
    assert append(base, STEPS).run.url != run.url

    def stop(fraction: float, note: str) -> None:
        if note.startswith("shard 1"):
            raise KeyboardInterrupt

    prepare(run, execute=serial)
    before = sums(base)
    with pytest.raises(KeyboardInterrupt):
        partition(run, stop)
    assert run.finished(PARTITION) is None
    make_data(run)
    assert sums(base) == before and RowsInfo.of(run.require(ROWS)).rows == 30
    (tmp_path / "photos" / later).unlink()
    quiet = Run.open(str(copytree(base.url, tmp_path / "copy", ignore=ignore_patterns("derived"))))
    straight = append(quiet, STEPS).run
    make_data(straight)
    for artifact in (ROWS, PARTITION, shard(0), shard(1)):
        assert straight.require(artifact).files == run.require(artifact).files


def test_what_cannot_be_appended_is_refused_by_a_line(tmp_path: Path) -> None:
    base = make_base(tmp_path, trained=False)
    photos = tmp_path / "photos"
    with pytest.raises(DataError, match=r"has no file that isn't in .* already; nothing to append"):
        append(base, STEPS)
    assert derived_from(base.store) == []
    write_digits(photos, range(200, 210))
    with pytest.raises(MissingArtifact, match=r"expert\.train\.init_from: .*no finished experts/000"):
        append(base, STEPS)
    with pytest.raises(DataError, match="no such folder"):
        append(base, STEPS, str(tmp_path / "elsewhere"))
    with pytest.raises(DataError, match="source digits: has no files that could be new"):
        append(base, STEPS, "digits")
    (photos / "eleven").mkdir()
    (photos / "eleven/a.png").write_bytes((photos / "0/0000.png").read_bytes())
    with pytest.raises(DataError, match="eleven"):
        append(base, STEPS)
    base.store.delete_one(f"{PARTITION}/{NAME}")
    with pytest.raises(MissingArtifact, match="no finished partition yet"):
        append(base, STEPS)


def test_changed_files_stay_and_mended_ones_are_taken(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    [broken] = write_digits(photos, range(300, 301))
    (photos / broken).write_bytes(b"no image")
    base = make_base(tmp_path)
    assert RowsInfo.of(base.require(ROWS)).rejected == 1
    changed, gone = write_digits(photos, range(2))
    (photos / changed).write_bytes((photos / changed).read_bytes() + b" ")
    (photos / gone).unlink()
    write_digits(photos, range(300, 301))
    new = append(base, STEPS).new
    assert list(new.files) == [broken] and new.changed == (changed,) and new.gone == (gone,)


def test_other_networks_and_damage_are_refused(tmp_path: Path) -> None:
    base = make_base(tmp_path)
    write_digits(tmp_path / "photos", range(200, 210))
    run = append(base, STEPS).run
    make_data(run)
    pixels = [next((Path(each.url) / ROWS / "_embedder").glob("*.safetensors")) for each in (base, run)]
    assert pixels[0].read_bytes() == pixels[1].read_bytes() and pixels[0].name == pixels[1].name
    earlier = f"{shard(0)}/train-00000.parquet"
    assert run.store.exists(earlier)
    with pytest.raises(StorageError, match="which must not be changed"):
        run.store.delete_one(earlier)
    rows = base.require(ROWS)
    base.store.delete_one(f"{ROWS}/{NAME}")
    altered = type(rows)(rows.artifact, rows.identity, rows.files, rows.info, "0" * 64)
    base.store.create(f"{ROWS}/{NAME}", altered.to_json())
    with pytest.raises(DriftError, match=f"input base/{ROWS}"):
        Run.open(run.url).require(ROWS)


def test_given_shards_are_their_owners_affair(tmp_path: Path) -> None:
    write_digits(tmp_path / "photos", range(2))
    run = Run.create(str(tmp_path / "run"), load_recipe("tiny", ("partition.method=given",)))
    with pytest.raises(ConfigError, match="shards are given"):
        append(run, STEPS)


def test_an_image_that_the_run_has_is_a_duplicate(tmp_path: Path) -> None:
    base = make_base(tmp_path, "data.duplicates=drop")
    photos = tmp_path / "photos"
    new = write_digits(photos, range(200, 210))
    for name in ("0/again.png", "0/once_more.png"):
        (photos / name).write_bytes((photos / "0/0000.png").read_bytes())
    run = append(base, STEPS).run
    make_data(run)
    info = RowsInfo.of(run.require(ROWS))
    assert (info.rows, info.duplicates, info.dropped) == (10, 2, 2)
    assert ids_of(run, 0) | ids_of(run, 1) == ids_of(base, 0) | ids_of(base, 1) | {*new}
