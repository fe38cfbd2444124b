"""A GPU that a training's state doesn't fit in is refused before it runs."""

from pathlib import Path

import pytest

from ddm_ray.config import load_recipe
from ddm_ray.errors import ConfigError
from ddm_ray.placement import TrainPlacement, Workers
from ddm_ray.run.graph import expert
from ddm_ray.run.run import Run
from ddm_ray.train.job import train_job
from ddm_ray.train.worker import require_room


@pytest.mark.parametrize(
    ("zero_stage", "workers", "most", "refused"),
    [(1, 1, 1, "for good"), (1, 1, 8, "for now"), (1, 2, 2, None), (3, 2, 2, None), (1, 2, 8, None)],
)
def test_a_state_that_a_gpu_cannot_hold_is_refused(
    tmp_path: Path, zero_stage: int, workers: int, most: int, refused: str | None
) -> None:
    """An expert of 3B on GPUs of 60 GB: its state takes 78 GB of one alone, and 45 GB of each of two."""
    job = train_job(Run.create(str(tmp_path / "run"), load_recipe("ddm-24b")), expert(0))
    placement = TrainPlacement(zero_stage=zero_stage, workers=Workers(min=1, max=most))
    if refused is None:
        require_room(job, placement, workers, int(60e9))
        return
    with pytest.raises(
        ConfigError, match=r"has 60\.0 GB, weights and optimizer take 77\.6 GB of each of 1, by"
    ) as full:
        require_room(job, placement, workers, int(60e9))
    assert full.value.passes is (refused == "for now")
