"""A whole run through the doors: `ray job submit ... jobs/<stage>.py` on an island's real Ray cluster."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from PIL import Image

from ddm_ray.storage.run import MONOLITH, PARTITION, ROUTER, ROWS, Run, evaluation
from tests.conftest import Island, ddm, submit


def test_every_stage_through_its_door(island: Island, finished_run: Run, tmp_path: Path) -> None:
    for artifact in (ROWS, PARTITION, *finished_run.experts, ROUTER, MONOLITH):
        assert finished_run.finished(artifact), artifact
    flops = {a: finished_run.require(a).info["training_flops"] for a in (*finished_run.experts, MONOLITH)}
    assert sum(flops[a] for a in finished_run.experts) == flops[MONOLITH]
    picture = tmp_path / "it.png"
    with ThreadPoolExecutor(2) as pool:
        sampled = pool.submit(submit, island, "sample", finished_run.url, "--class", "3", "-o", str(picture))
        submit(island, "evaluate", finished_run.url)
        sampled.result()
    with Image.open(picture) as image:
        assert len(set(image.convert("L").tobytes())) > 20
    metrics = json.loads(finished_run.read(evaluation("default"), "metrics.json"))
    assert {row["name"] for row in metrics["models"]} == {"monolith", "once", "full", "top-1"}


def test_a_submitted_job_refuses_a_relative_run(island: Island) -> None:
    with pytest.raises(AssertionError, match=r"error: RUN 'runs/x' is relative; a submitted job needs"):
        submit(island, "prepare", "runs/x")


def test_status_reads_storage_alone(finished_run: Run) -> None:
    shown = ddm("status", finished_run.url)
    assert shown.returncode == 0
    assert "experts/001    finished  100%  300 steps, loss" in shown.stdout


def test_a_finished_stage_again_is_a_no_op(finished_run: Run) -> None:
    before = finished_run.store.sizes("experts/000")
    again = ddm("train", finished_run.url, "expert", "0")
    assert again.returncode == 0
    assert finished_run.store.sizes("experts/000") == before
