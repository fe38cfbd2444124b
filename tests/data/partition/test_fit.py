"""How far appended rows are: beside what a report keeps of the earlier rows' distances, or beside a sample of them."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load

from ddm_ray.config import load_recipe
from ddm_ray.data import no_progress
from ddm_ray.data.append import append
from ddm_ray.data.partition.distances import CLUSTER_BYTES, FILE
from ddm_ray.data.partition.fit import SAMPLE_PARTS, earlier
from ddm_ray.data.partition.report import read_clustering, report
from ddm_ray.data.partition.stage import partition
from ddm_ray.data.prepare.stage import prepare
from ddm_ray.data.schema import embeddings, trains
from ddm_ray.data.sharded.serial import serial
from ddm_ray.errors import CorruptArtifact
from ddm_ray.storage.attempts import claim
from ddm_ray.storage.extend import extend
from ddm_ray.storage.graph import CENTROIDS, PARTITION, REPORT, ROWS
from ddm_ray.storage.info import ReportInfo
from ddm_ray.storage.manifest import NAME, FileRecord, Manifest
from ddm_ray.storage.run import Run
from tests.data.appended import as_of_an_older_version, assert_fits, make_base, make_data, write_digits
from tests.data.rows import read_artifact
from tests.random_run import publish_models
from tests.storage.artifacts import save_state

STEPS = {"expert": 20}


def distances(*runs: Run) -> list[np.ndarray]:
    """For each cluster the distances of all these runs' training rows, by brute force."""
    coarse_KD = load(runs[0].read(CENTROIDS, next(iter(runs[0].require(CENTROIDS).files))))["coarse_KD"]
    tables = [read_artifact(run, ROWS) for run in runs]
    embedding_ND = np.concatenate([embeddings(table)[trains(table)] for table in tables])
    distance_NK = np.linalg.norm(embedding_ND[:, None] - coarse_KD, axis=2)
    return [distance_NK.min(axis=1)[distance_NK.argmin(axis=1) == cluster] for cluster in range(len(coarse_KD))]


def fit_of(run: Run) -> tuple:
    return ReportInfo.of(run.require(REPORT)).fit


def lose_parts(run: Run) -> None:
    """Delete what a run's rows are, but for their manifest: whoever reads one of them fails."""
    for path in (Path(run.url) / ROWS).glob("part-*"):
        path.unlink()


def test_no_earlier_row_is_read_in_any_generation(tmp_path: Path) -> None:
    base = make_base(tmp_path)
    exact = [distances(base)]
    lose_parts(base)
    write_digits(tmp_path / "photos", range(200, 260))
    first = append(base, STEPS).run
    make_data(first)
    for seen, new_N, old_N in zip(fit_of(first), distances(first), exact[0], strict=True):
        assert_fits(seen, new_N, old_N)
    publish_models(first)
    exact.append(distances(first))
    lose_parts(first)
    for job in first.experts:
        save_state(claim(first.store, job), 20, first.identity(job), {"rank-000/a": b"state"}, keep=2)
    longer = extend(first, {"expert": 30}).run  # which has the report of the one that it extends
    publish_models(longer)
    write_digits(tmp_path / "photos", range(260, 320))
    second = append(longer, STEPS).run
    make_data(second)
    for seen, new_N, *old in zip(fit_of(second), distances(second), *exact, strict=True):
        assert_fits(seen, new_N, np.concatenate(old))
    assert b"drawn at random" not in second.read(REPORT, "report.html")
    page = second.read(REPORT, "report.html")
    second.store.delete(REPORT)
    report(second)
    assert second.read(REPORT, "report.html") == page


@pytest.mark.parametrize("settings", [("partition.max_share=0.6",), ("partition.nearest=fine",)])
def test_rows_count_for_the_cluster_that_they_are_in(settings: tuple[str, ...], tmp_path: Path) -> None:
    base = make_base(tmp_path, *settings)
    write_digits(tmp_path / "photos", range(200, 230))
    run = append(base, STEPS).run
    lose_parts(base)
    make_data(run)
    assert [seen.rows_before for seen in fit_of(run)] == base.require(PARTITION).info["rows_K"]
    assert all(0 < seen.distance_before < seen.far_before for seen in fit_of(run))


def in_parts(folder: Path, rows_of_a_part: int) -> Run:
    """A base whose rows are in many parts and whose report is an older version's."""
    write_digits(folder / "photos", range(200))
    run = Run.create(str(folder / "run"), load_recipe("tiny", (f"data.source={folder / 'photos'}",)))
    prepare(run, execute=serial, chunk_rows=rows_of_a_part)
    partition(run)
    publish_models(run)
    as_of_an_older_version(run)
    return run


def test_a_report_of_an_older_version_stays_and_its_rows_are_read(tmp_path: Path) -> None:
    base = in_parts(tmp_path, 20)
    before = base.require(REPORT)
    partition(base)
    assert base.require(REPORT) == before and FILE not in before.files
    write_digits(tmp_path / "photos", range(200, 260))
    run, notes = append(base, STEPS).run, list[tuple[float, str]]()
    prepare(run, execute=serial)
    partition(run, lambda fraction, note: notes.append((fraction, note)))
    assert [fraction for fraction, _ in notes] == sorted(fraction for fraction, _ in notes)
    assert sum("a sample of 200 earlier rows: " in note for _, note in notes) == 10
    for seen, new_N, old_N in zip(fit_of(run), distances(run), distances(base), strict=True):
        assert_fits(seen, new_N, old_N)
    assert b"drawn at random" not in run.read(REPORT, "report.html")


def test_a_sample_of_many_parts_is_bounded_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = in_parts(tmp_path, 2)
    write_digits(tmp_path / "photos", range(200, 260))
    run = append(base, STEPS).run
    prepare(run, execute=serial)
    exact = distances(base)
    monkeypatch.setattr("ddm_ray.data.partition.fit.SAMPLE_ROWS", 100)
    partition(run)
    for seen, new_N, old_N in zip(fit_of(run), distances(run), exact, strict=True):
        assert_fits(seen, new_N, old_N, error=0.2)
    clustering = read_clustering(run, run.require(CENTROIDS))
    drawn = [earlier(run, None, clustering, no_progress) for _ in range(2)]
    assert 0 < drawn[0].distances.measured <= 2 * SAMPLE_PARTS < 200
    assert drawn[0].distances.to_bytes() == drawn[1].distances.to_bytes()
    many, total = drawn[0].distances.measured, sum(drawn[0].rows_K)
    assert drawn[0].distances.rows_K.tolist() == [*drawn[0].rows_K]
    words = f"of {many} of {total} training rows, of parts drawn at random"
    assert words in run.read(REPORT, "report.html").decode()
    with monkeypatch.context() as other:
        other.setattr("ddm_ray.data.partition.fit.SAMPLE_ROWS", 200)
        everything = earlier(run, None, clustering, no_progress).distances
    assert everything.measured == total and everything.to_bytes() != drawn[0].distances.to_bytes()
    # What the next one is compared with is the sample still: it says so, too.
    publish_models(run)
    write_digits(tmp_path / "photos", range(260, 280))
    later = append(run, STEPS).run
    lose_parts(base)
    make_data(later)
    new = sum(seen.rows for seen in fit_of(run))
    words = f"of {many + new} of {total + new} training rows, of parts drawn at random"
    assert words in later.read(REPORT, "report.html").decode()


def replaced(run: Run, data: bytes, size: int | None = None) -> Manifest:
    manifest, record = run.require(REPORT), FileRecord.of(data)
    record = FileRecord(size or record.bytes, record.sha256)
    run.store.write(f"{REPORT}/{FILE}", data)
    changed = Manifest(manifest.artifact, manifest.identity, {**manifest.files, FILE: record}, manifest.info)
    run.store.write(f"{REPORT}/{NAME}", changed.to_json())
    return changed


def test_a_file_that_is_no_record_is_refused_by_name(tmp_path: Path) -> None:
    base = make_base(tmp_path)
    write_digits(tmp_path / "photos", range(200, 230))
    run = append(base, STEPS).run
    make_data(run)
    clustering = read_clustering(run, run.require(CENTROIDS))
    where = f"{base.url}/{REPORT}/{FILE}"
    with pytest.raises(CorruptArtifact, match="not a record of distances") as caught:
        earlier(run, replaced(base, b"{}"), clustering, no_progress)
    assert str(caught.value).startswith(where)
    with pytest.raises(CorruptArtifact, match=f"has {2**40} bytes, and may have {2 * CLUSTER_BYTES}"):
        earlier(run, replaced(base, b"{}", size=2**40), clustering, no_progress)
    manifest = replaced(base, b"{}")
    base.store.write(f"{REPORT}/{FILE}", b"[]")
    with pytest.raises(CorruptArtifact, match="checksum differs"):
        earlier(run, manifest, clustering, no_progress)
