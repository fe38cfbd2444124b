"""Estimates of a training before it runs: its time by what was counted, and a GPU that its state doesn't fit in."""

import re
from pathlib import Path

import pytest

from ddm_ray.config import load_recipe
from ddm_ray.errors import ConfigError
from ddm_ray.models import weights
from ddm_ray.models.flops import num_parameters, training_flops_per_row
from ddm_ray.models.spec import spec_of
from ddm_ray.placement import TrainPlacement, Workers
from ddm_ray.storage.graph import expert
from ddm_ray.storage.run import Run
from ddm_ray.train.estimate import CARDS
from ddm_ray.train.job import train_job
from ddm_ray.train.state_memory import require_state_fits
from tests.conftest import ROOT

COUNTED = re.compile(
    r"^DiT-XL/2, 675 M parameters, (?P<rows>\d+) rows, bf16:.*?"
    r"^H100: (?P<H100>\d+) ms a step, MFU (?P<H100_mfu>\d+)%, estimated\n"
    r"H200: (?P<H200>\d+) ms a step, MFU (?P<H200_mfu>\d+)%, estimated",
    re.MULTILINE | re.DOTALL,
)


@pytest.mark.parametrize("rows", [32, 256])
def test_a_steps_time_is_that_of_counted_kernels(rows: int) -> None:
    """Of DiT-XL/2, as benchmarks/gpu_counts.py has it from kernels one by one."""
    results = (ROOT / "benchmarks/RESULTS.md").read_text()
    (counted,) = [each for each in COUNTED.finditer(results) if int(each["rows"]) == rows]
    network = weights.build(spec_of(load_recipe("imagenet256-k8"), "expert"), "meta")
    parameters, flops = num_parameters(network), rows * training_flops_per_row(network, (4, 32, 32))
    for card in CARDS:
        assert 1e3 * card.step_seconds(parameters, flops) == pytest.approx(float(counted[card.name]), rel=0.02)
        assert 100 * card.mfu(parameters, flops) == pytest.approx(float(counted[f"{card.name}_mfu"]), abs=1)


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
        require_state_fits(job, placement, workers, int(60e9))
        return
    with pytest.raises(
        ConfigError, match=r"has 60\.0 GB, weights and optimizer take 77\.6 GB of each of 1, by"
    ) as full:
        require_state_fits(job, placement, workers, int(60e9))
    assert full.value.passes is (refused == "for now")
