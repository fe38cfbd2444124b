"""Every shipped recipe, and every kind of text, goes through all stages: each takes what the one before it writes.

Sizes are small. A recipe that is added is tested too.
"""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from ddm_ray import cli
from ddm_ray.config import recipe_names
from ddm_ray.data.partition.stage import partition
from ddm_ray.data.prepare.stage import prepare
from ddm_ray.data.sharded.serial import serial
from ddm_ray.pipeline import DDMPipeline
from ddm_ray.placement import TrainPlacement
from ddm_ray.run.graph import MONOLITH, ROUTER, STUDENT
from ddm_ray.run.run import Run
from ddm_ray.train import worker
from tests.train.small_recipe import prompts_of, smaller

pytestmark = pytest.mark.contract

CLIP = {"encoder": "a/clip", "tokens": 12, "dim": 16}
T5 = {"encoder": "a/t5", "tokens": 20, "dim": 24}
POOLED = {"pooled_encoder": "another/clip", "pooled_dim": 8}
TEXTS = {
    "clip": CLIP | {"stored": "features"},
    "clip with its own pooled vector": CLIP | {"pooled_dim": 16, "stored": "ids"},
    "clip with another pooled vector": CLIP | POOLED | {"stored": "ids"},
    "t5": T5 | {"stored": "ids"},
    "t5 with a pooled vector": T5 | POOLED | {"stored": "features"},
}


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_goes_through_all_stages(name: str, tmp_path: Path, world_of_one: None) -> None:
    run = prepared(name, smaller(name, tmp_path), tmp_path / "run")
    for artifact in (*run.experts, ROUTER, MONOLITH, STUDENT):
        worker.train(run.url, artifact, TrainPlacement(heldout_rows=4))
    for model in ("mixture", "monolith", "student"):
        sample(DDMPipeline.from_run(run, model=model), run, tmp_path / model)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_a_kind_of_text_goes_through_all_stages(text: dict[str, object], tmp_path: Path, world_of_one: None) -> None:
    """Each encoder, with and without a pooled vector, of its own or of another, encoded beforehand or as it trains."""
    setting = f"data.text={json.dumps(text)}"
    run = prepared("captions-gpu", smaller("captions-gpu", tmp_path, (setting,)), tmp_path / "run")
    for artifact in (*run.experts, ROUTER):
        worker.train(run.url, artifact, TrainPlacement(heldout_rows=4))
    sample(DDMPipeline.from_run(run), run, tmp_path / "mixture")


def prepared(recipe: str, settings: tuple[str, ...], folder: Path) -> Run:
    """The recipe's run with these settings, begun by `ddm init`, its rows prepared and partitioned."""
    words = [word for setting in settings for word in ("--set", setting)]
    begun = CliRunner().invoke(cli.main, ["init", str(folder), "--recipe", recipe, *words])
    assert begun.exit_code == 0, begun.output
    run = Run.open(str(folder))
    prepare(run, execute=serial)
    partition(run, with_report=False)
    return run


def sample(pipeline: DDMPipeline, run: Run, folder: Path) -> None:
    """Two images of a run's model, which the folder that it is exported to gives as well."""
    asked = {**prompts_of(run.config), "seeds": [1, 2], "output_type": "pt"}
    images_BCHW = pipeline(**asked).images
    assert images_BCHW.isfinite().all()
    assert tuple(images_BCHW.shape) == (2, *run.config.data.pixel_shape)
    pipeline.save_pretrained(folder)
    assert torch.equal(DDMPipeline.from_pretrained(folder)(**asked).images, images_BCHW)
