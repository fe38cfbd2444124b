"""How far appended rows are from their centroids, beside the rows that the clusters were made of."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load

from ddm_ray.data.partition.report import report
from ddm_ray.data.partition.stage import partition
from ddm_ray.data.schema import embeddings, trains
from ddm_ray.jobs.attempts import claim
from ddm_ray.run.graph import CENTROIDS, PARTITION, REPORT, ROWS
from ddm_ray.run.info import ReportInfo
from ddm_ray.run.manifest import NAME
from ddm_ray.run.run import Run
from tests.data.appended import assert_fits, make_base, make_data, write_digits
from tests.data.rows import read_artifact
from tests.derived import append, extend
from tests.random_run import publish_models
from tests.run.artifacts import save_state

pytestmark = pytest.mark.contract

STEPS = {"expert": 20}


def distances(run: Run) -> list[np.ndarray]:
    """For each cluster the distances of the run's training rows, by brute force."""
    coarse_KD = load(run.read(CENTROIDS, next(iter(run.require(CENTROIDS).files))))["coarse_KD"]
    table = read_artifact(run, ROWS)
    embedding_ND = embeddings(table)[trains(table)]
    distance_NK = np.linalg.norm(embedding_ND[:, None] - coarse_KD, axis=2)
    return [distance_NK.min(axis=1)[distance_NK.argmin(axis=1) == cluster] for cluster in range(len(coarse_KD))]


def fit_of(run: Run) -> tuple:
    return ReportInfo.of(run.require(REPORT)).fit


def lose_parts(run: Run) -> None:
    """Delete what a run's rows are, but for their manifest: whoever reads one of them fails."""
    for path in (Path(run.url) / ROWS).glob("part-*"):
        path.unlink()


def test_rows_of_any_generation_are_beside_those_that_clusters_were_made_of(tmp_path: Path) -> None:
    base = make_base(tmp_path)
    exact = distances(base)
    lose_parts(base)
    write_digits(tmp_path / "photos", range(200, 260))
    first = append(base, STEPS).run
    make_data(first)
    for seen, new_N, old_N in zip(fit_of(first), distances(first), exact, strict=True):
        assert_fits(seen, new_N, old_N)
    publish_models(first)
    lose_parts(first)
    for job in first.experts:
        save_state(claim(first.store, job), 20, first.identity(job), {"rank-000/a": b"state"}, keep=2)
    longer = extend(first, "expert.train.steps=30")  # which has the report of the one that it extends
    publish_models(longer)
    write_digits(tmp_path / "photos", range(260, 320))
    second = append(longer, STEPS).run
    make_data(second)
    for seen, new_N, old_N in zip(fit_of(second), distances(second), exact, strict=True):
        assert_fits(seen, new_N, old_N)
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
    old_K, all_K = (np.array(each.require(PARTITION).info["rows_K"]) for each in (base, run))
    assert [seen.rows for seen in fit_of(run)] == (all_K - old_K).tolist()
    assert all(seen.far is not None and seen.far <= seen.rows for seen in fit_of(run))


def test_rows_are_not_compared_with_a_report_that_has_no_distances(tmp_path: Path) -> None:
    base = make_base(tmp_path)
    manifest = base.require(REPORT)
    info = {name: value for name, value in manifest.info.items() if name != "far_K"}  # as an older version made it
    base.store.write(f"{REPORT}/{NAME}", replace(manifest, info=info).to_json())
    before = base.require(REPORT)
    partition(base)
    assert base.require(REPORT) == before
    write_digits(tmp_path / "photos", range(200, 230))
    run = append(base, STEPS).run
    make_data(run)
    assert fit_of(run) == ()
