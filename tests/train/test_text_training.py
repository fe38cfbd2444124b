"""Training on texts and latents, from shards to images: experts and router see the rows' texts."""

import shutil
from pathlib import Path

import pytest
import torch

from ddm_ray.config import SamplingSettings
from ddm_ray.core.condition import Text
from ddm_ray.data.loading.loader import load_rows
from ddm_ray.data.schema import HELDOUT
from ddm_ray.placement import TrainPlacement
from ddm_ray.run.graph import ROUTER, STUDENT, expert, shard
from ddm_ray.run.manifest import NAME
from ddm_ray.run.run import Run
from ddm_ray.sampling.request import SampleRequest
from ddm_ray.sampling.run_models import load_models, load_trained
from ddm_ray.train import worker
from ddm_ray.train.job import train_job
from ddm_ray.train.publish import WEIGHTS
from ddm_ray.train.state import CURVE
from tests.random_run import make_texts
from tests.train.results import difference, weights_of

pytestmark = pytest.mark.contract

STEPS = ("expert.train.steps=60", "router.train.steps=60", "router.train.learning_rate=0.01")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, world_of_one: None) -> Run:
    """Two experts and the router of random latents and texts; streamed, not held in memory."""
    run = make_texts(str(tmp_path_factory.mktemp("texts") / "run"), STEPS)
    for artifact in (expert(0), expert(1), ROUTER):
        worker.train(run.url, artifact, TrainPlacement(rows_gib=0, micro_batch=3))
    return run


def test_a_mixture_trained_on_texts_samples_from_texts(trained: Run) -> None:
    models = load_models(trained)
    assert models.info.num_classes is None
    assert models.info.prior_CK.tolist() == [[0.5, 0.5]]
    text = load_rows(trained, [shard(0), shard(1)], HELDOUT).text
    assert text is not None and len(text) == 10
    for strategy in ("once", "full", "top-1"):
        request = SampleRequest(tuple(range(10)), text, SamplingSettings(steps=4, strategy=strategy))
        images_BCHW = models.sample(request).images_BCHW
        assert images_BCHW.shape == (10, 4, 4, 4) and images_BCHW.isfinite().all()


def test_texts_are_learned_from(trained: Run) -> None:
    """The way in for texts is closed in a fresh network."""
    model = load_trained(trained, expert(0))
    x_BCHW, t_B = torch.randn(2, 4, 4, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0.5, 0.5])
    text = load_rows(trained, [shard(0)], HELDOUT).text
    assert text is not None
    with torch.inference_mode():
        one, other = (model(x_BCHW, t_B, text[torch.tensor([row, row])]) for row in (0, 4))
    assert (one - other).abs().max() > 1e-4


def test_the_router_knows_the_clusters_of_held_out_rows(trained: Run) -> None:
    router, rows = load_trained(trained, ROUTER), load_rows(trained, [shard(0), shard(1)], HELDOUT)
    assert isinstance(rows.text, Text)
    with torch.inference_mode():
        logits_BK = router(rows.data_NCHW, torch.full((len(rows),), 0.05), rows.text)
    assert torch.equal(logits_BK.argmax(1), rows.cluster_N)


def test_models_of_texts_have_no_picture(trained: Run) -> None:
    prefix = trained.require(expert(0)).info["weights"]
    assert set(trained.store.sizes(f"{expert(0)}/{prefix}")) == {NAME, WEIGHTS, "model.json", CURVE}


def test_a_student_of_texts_learns_the_same_of_two_experts_at_a_time(trained: Run, tmp_path: Path) -> None:
    """Or of all at once: texts, and the null one, are those of the rows."""
    student = "student.train={steps: 4, batch: 8, learning_rate: 1.0e-3, ema_decay: 0.5}"
    runs = []
    for name, teachers in (("held", None), ("offloaded", 2)):
        run = make_texts(str(tmp_path / name), (*STEPS, student, "student.guidance_scale=2.0"))
        shutil.copytree(f"{trained.url}/experts", tmp_path / name / "experts")
        worker.train(run.url, STUDENT, TrainPlacement(teachers=teachers, micro_batch=3))
        runs.append(run)
    assert difference(weights_of(runs[0], STUDENT), weights_of(runs[1], STUDENT)) < 1e-5
    untaught = train_job(runs[0], STUDENT).build().state_dict()
    learned = weights_of(runs[0], STUDENT)
    assert difference(learned, {name: untaught[name] for name in learned}) > 1e-3
