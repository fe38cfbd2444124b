"""The report as an artifact: made with its partition or again by itself, the same bytes either way."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from ddm_ray.cli import main
from ddm_ray.data.partition.report import report
from ddm_ray.data.partition.report_builder import Report, ReportBuilder
from ddm_ray.data.partition.stage import partition
from ddm_ray.errors import MissingArtifact
from ddm_ray.run.graph import PARTITION, REPORT, ROWS, owner_rows, shard
from ddm_ray.run.info import ReportInfo
from ddm_ray.run.manifest import NAME, FileRecord
from ddm_ray.run.run import Run
from ddm_ray.store.store import Store
from tests.data.damage import Damage, Folder, damages
from tests.data.groups import FOUR, rows, run_of
from tests.data.partitions import contents, copy_of
from tests.data.rows import commit_tables

pytestmark = pytest.mark.contract

METHODS = [("partition.max_share=0.3",), ("partition.method=pixels",), ("partition.method=random",)]


@pytest.fixture
def reported(parted: Run, tmp_path: Path) -> Run:
    run = copy_of(parted, tmp_path / "run")
    report(run)
    return run


@pytest.mark.parametrize("method", METHODS)
def test_a_report_made_alone_is_that_of_the_whole_stage(method: tuple[str, ...], tmp_path: Path) -> None:
    with_report, without = (run_of(str(tmp_path / name), rows(), *FOUR, *method) for name in ("with", "without"))
    notes: list[tuple[float, str]] = []
    partition(with_report, lambda fraction, note: notes.append((fraction, note)))
    assert [fraction for fraction, _ in notes] == sorted(fraction for fraction, _ in notes)
    assert partition(without, with_report=False) == with_report.require(PARTITION)
    assert not without.store.sizes(REPORT)
    report(without)
    assert contents(without) == contents(with_report)
    assert [*with_report.require(REPORT).files] == ["report.html"]
    assert with_report.read(REPORT, "report.html")
    assert partition(without) == partition(with_report, lambda *_: pytest.fail("a finished stage does nothing"))


def test_a_stage_stopped_before_its_report_makes_the_report_alone(tmp_path: Path) -> None:
    run, undisturbed = (run_of(str(tmp_path / name), rows(), *FOUR) for name in ("run", "whole"))
    partition(undisturbed)

    def stop(fraction: float, note: str) -> None:
        if note == "report":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        partition(run, stop)
    assert run.finished(PARTITION) and not run.finished(REPORT)
    partition(run)
    assert contents(run) == contents(undisturbed)


def test_a_damaged_report_is_made_again(reported: Run) -> None:
    """Of any damage that a look at names and sizes shows; the partition itself is never in doubt."""
    folder, generator = Folder(Path(reported.url)), np.random.default_rng(0)
    for key in [key for key in folder.files if key.startswith(f"{REPORT}/")]:
        kinds = list(damages(key, folder.files, generator, 1, 1, 1))
        lost = [damage for damage in kinds if damage.data is None or len(damage.data) != len(folder.files[key])]
        for damage in [Damage(key, "gone", None), lost[int(generator.integers(len(lost)))]]:
            with folder.damaged(damage):
                assert partition(Run.open(reported.url)).artifact == PARTITION
                assert folder.now() == folder.files, damage


def test_a_report_of_an_earlier_partition_is_made_again(reported: Run, tmp_path: Path) -> None:
    other = run_of(str(tmp_path / "other"), rows(), *FOUR)
    partition(other)
    stale = {key: other.store.read(f"{REPORT}/{key}") for key in other.store.sizes(REPORT)}
    other.store.delete(PARTITION)
    other.store.delete(ROWS)
    commit_tables(other, [rows(seed=1).table(other.config)])
    partition(other, with_report=False)
    for key, data in stale.items():
        other.store.write(f"{REPORT}/{key}", data)
    other.store.write(f"{REPORT}/cluster-000.png", b"as older versions drew them")
    report(other)
    assert other.finished(REPORT) and {*other.store.sizes(REPORT)} == {"report.html", NAME}
    assert {key: other.store.read(f"{REPORT}/{key}") for key in stale} != stale


def test_a_report_of_another_machine_stays_as_it_is(
    parted: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pictures of another matplotlib: the other one writes its report and finishes while this one is about to."""
    run, mine = copy_of(parted, tmp_path / "run"), []
    build, create = ReportBuilder.build, Store.create

    def other_build(self: ReportBuilder, *args) -> Report:
        return dataclasses.replace(build(self, *args), html=b"other pixels")

    def create_late(self: Store, key: str, data: bytes) -> bool:
        if not mine and key == f"{REPORT}/report.html":
            mine.append(data)
            with monkeypatch.context() as other:
                other.setattr(ReportBuilder, "build", build)
                report(Run.open(run.url))
                assert run.finished(REPORT)
        return create(self, key, data)

    monkeypatch.setattr(ReportBuilder, "build", other_build)
    monkeypatch.setattr(Store, "create", create_late)
    report(run)
    assert mine == [b"other pixels"]
    assert run.read(REPORT, "report.html") != b"other pixels"


def test_a_report_needs_a_partition(tmp_path: Path) -> None:
    with pytest.raises(MissingArtifact, match="has no finished partition yet"):
        report(run_of(str(tmp_path / "run"), rows(), *FOUR))


def test_a_partition_that_lists_its_report_keeps_it(reported: Run) -> None:
    """As older versions made them: the report's bytes are the partition's own files."""
    manifest = reported.require(PARTITION)
    reported.store.delete_one(f"{PARTITION}/{NAME}")
    reported.store.delete_one(f"{REPORT}/{NAME}")
    own = {f"report/{name}": record for name, record in Run.open(reported.url).require(shard(0)).files.items()}
    html = next(iter(own.values()))
    records = manifest.files | {"report/report.html": html}
    reported.commit_records(PARTITION, records, PARTITION.info.of(manifest))
    before = contents(reported)
    report(reported)
    assert contents(reported) == before


def test_the_report_of_given_shards_needs_no_rows(tmp_path: Path) -> None:
    run = run_of(str(tmp_path / "run"), rows(), "partition.method=given", artifact=owner_rows(0))
    for cluster in (0, 1):
        if cluster:
            commit_tables(run, [rows(seed=1).table(run.config, embedding=False)], owner_rows(1))
        partition(run, cluster=cluster)
        run.store.delete(owner_rows(cluster))
    partition(run)
    assert set(run.require(REPORT).files) == {"report.html"}
    assert ReportInfo.of(run.require(REPORT)).silhouette is None
    run.store.delete(REPORT)
    report(run)
    assert set(run.require(REPORT).files) == {"report.html"}


def test_the_command_shows_warnings_of_an_older_version_too(reported: Run) -> None:
    """It kept its report, and what came of it, in the partition itself."""
    shown = CliRunner().invoke(main, ["partition", reported.url])
    assert shown.exit_code == 0 and "silhouette of the clusters: " in shown.output
    page, partition = reported.store.read(f"{REPORT}/report.html"), reported.require(PARTITION)
    reported.store.delete_one(f"{REPORT}/{NAME}")
    files = {**partition.files, "report/report.html": FileRecord.of(page)}
    fit = {"rows": 3, "distance": 0.5, "rows_before": 60, "distance_before": 0.4, "far_before": 1.0, "far": 1}
    info = {**partition.info, "silhouette": 0.25, "silhouette_K": [0.25] * 4, "warnings": ["cluster 2 is empty"]}
    info["fit"] = [fit]
    reported.store.write(f"{PARTITION}/{NAME}", dataclasses.replace(partition, files=files, info=info).to_json())
    shown = CliRunner().invoke(main, ["partition", reported.url])
    assert shown.exit_code == 0, shown.output
    assert "silhouette of the clusters: 0.250" in shown.output and "cluster 2 is empty" in shown.output
    assert "cluster 0: 3 new training rows, 1 of them farther from its centroid than 99 %" in shown.output
    assert not reported.store.exists(f"{REPORT}/{NAME}")
    assert f"next: ddm train {reported.url} all\n" in shown.output
