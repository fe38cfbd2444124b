"""Pictures of milestones: the same weights give the same bytes anywhere, other weights another picture."""

import io
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ddm_ray.config import load_recipe
from ddm_ray.core.streams import SeedPurpose, consecutive_seeds
from ddm_ray.errors import CorruptArtifact
from ddm_ray.models import weights
from ddm_ray.pictures.grid import GridRow, grid
from ddm_ray.pictures.png import to_png
from ddm_ray.run.graph import MONOLITH, PARTITION, Artifact, expert, shard
from ddm_ray.run.run import Run
from ddm_ray.sampling.request import SampleRequest
from ddm_ray.sampling.run_models import Models, load_trained, monolith_info
from ddm_ray.train.preview import MAX_CLASSES, PER_CLASS, picture
from tests.infos import commit_written, info_of
from tests.random_run import make_run
from tests.sampling import tiny_components

pytestmark = pytest.mark.contract

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(str(tmp_path_factory.mktemp("milestone") / "run"), num_rows=200)


def published(run: Run, artifact: Artifact) -> tuple[dict[str, Any], bytes]:
    """Spec and EMA weights of a finished job, as a milestone has them."""
    prefix = run.require(artifact).info["weights"]
    return json.loads(run.read(artifact, f"{prefix}/model.json")), run.read(artifact, f"{prefix}/ema.safetensors")


def again(run: Run, **sections: dict[str, Any]) -> Run:
    """The run's storage under a configuration that differs in how it samples or evaluates."""
    config = run.config.model_copy(
        update={name: getattr(run.config, name).model_copy(update=fields) for name, fields in sections.items()}
    )
    return Run(run.store, config)


def test_it_is_the_same_for_every_attempt_and_thread(run: Run) -> None:
    spec, ema = published(run, Artifact("experts/001"))
    before = torch.get_rng_state(), torch.get_num_threads(), np.random.get_state()[1].tolist()
    pictures = [picture(run, spec, ema, 1, CPU)]

    def beside() -> None:
        pictures.append(picture(Run.open(run.url), dict(spec), bytes(ema), 1, "cpu"))

    thread = threading.Thread(target=beside)
    thread.start()
    thread.join()
    assert len(pictures) == 2 and pictures[0] == pictures[1]
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (torch.get_num_threads(), np.random.get_state()[1].tolist())
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    others = {picture(run, *published(run, artifact), 1, CPU) for artifact in (expert(0), MONOLITH)}
    assert len(others | set(pictures)) == 3


@pytest.mark.parametrize("cluster", [0, 1, None])
def test_it_shows_the_classes_that_were_trained_on(run: Run, cluster: int | None) -> None:
    artifact = MONOLITH if cluster is None else expert(cluster)
    counts_CK = np.array(run.require(PARTITION).info["counts_CK"])
    counts_C = counts_CK.sum(1) if cluster is None else counts_CK[:, cluster]
    labels = sorted(np.argsort(-counts_C, kind="stable")[:MAX_CLASSES].tolist())
    assert len(labels) == MAX_CLASSES
    request = SampleRequest(
        consecutive_seeds(run.config.evaluate.seed, MAX_CLASSES * PER_CLASS, SeedPurpose.PREVIEW),
        torch.tensor(labels).repeat_interleave(PER_CLASS),
        run.config.sample,
    )
    models = Models(monolith_info(run), (load_trained(run, artifact),), None)
    images = models.sample(request).images_BCHW.split(PER_CLASS)
    expected = grid([GridRow(str(label), part) for label, part in zip(labels, images, strict=True)])
    assert picture(run, *published(run, artifact), cluster, CPU) == to_png(expected)


def test_it_samples_as_the_run_does(run: Run) -> None:
    spec, ema = published(run, Artifact("experts/000"))
    variants = [
        run,
        again(run, evaluate={"seed": 1}),
        again(run, sample={"guidance_scale": 3.0}),
        again(run, sample={"guidance_scale": 3.0, "guidance_interval": (0.4, 0.6)}),
        again(run, sample={"steps": 3}),
        again(run, sample={"solver": "euler"}),
        again(run, sample={"times": "cosine"}),
    ]
    assert len({picture(variant, spec, ema, 0, CPU) for variant in variants}) == len(variants)
    as_noise = {**spec, "flow": {"path": "cosine", "prediction": "noise"}}
    assert picture(run, as_noise, ema, 0, CPU) != picture(run, spec, ema, 0, CPU)


def test_a_single_class_fills_the_picture(tmp_path: Path) -> None:
    settings = ("data.class_names=[thing]", "partition.num_clusters=1")
    run = Run.create(str(tmp_path / "run"), load_recipe("tiny", settings))
    run.store.write(f"{shard(0)}/x", b"rows")
    commit_written(run, shard(0), ["x"], info_of(shard(0), rows=7, rows_train=7, counts_C=(7,)))
    sizes = run.config.expert.model.model_dump()
    spec = {"class": "DiT", "config": {"image_size": 8, "channels": 1, "num_classes": 1, "text_dim": None, **sizes}}
    torch.manual_seed(0)
    ema, _ = weights.weights_as_bytes(weights.build(spec), spec)
    image = Image.open(io.BytesIO(picture(run, spec, ema, 0, CPU)))
    # No names beside it: margins of 8, and 4 x 4 tiles of 48 with gaps of 3.
    assert image.size == (8 + 8 + 4 * 51 + 8, 8 + 4 * 51 + 8)


def test_latents_are_decoded_to_pixels(tmp_path: Path) -> None:
    tiny_components.autoencoder().save_pretrained(tmp_path / "vae")
    latents = f"data.latents={{autoencoder: {tmp_path / 'vae'}, downsampling: 2, scale: 0.5}}"
    settings = (latents, "data.channels=4", "data.class_names=[cat, dog]", "partition.num_clusters=1", "sample.steps=2")
    run = Run.create(str(tmp_path / "run"), load_recipe("tiny", settings))
    run.store.write(f"{shard(0)}/x", b"rows")
    commit_written(run, shard(0), ["x"], info_of(shard(0), rows=12, rows_train=12, counts_C=(7, 5)))
    sizes = run.config.expert.model.model_dump()
    spec = {"class": "DiT", "config": {"image_size": 8, "channels": 4, "num_classes": 2, "text_dim": None, **sizes}}
    torch.manual_seed(0)
    ema, _ = weights.weights_as_bytes(weights.build(spec), spec)
    before = torch.get_rng_state()
    png = picture(run, spec, ema, 0, CPU)
    assert torch.equal(before, torch.get_rng_state())
    assert png == picture(run, spec, ema, 0, CPU)
    image = Image.open(io.BytesIO(png))
    # 16 x 16 pixels of an 8 x 8 latent, enlarged by 3, in two rows.
    assert image.height == 8 + 2 * 50 + 8
    pixels = np.asarray(image)
    assert (pixels[..., 0] != pixels[..., 1]).any()  # colours, which a latent of four channels couldn't be drawn in


def test_weights_that_do_not_fit_are_refused(run: Run) -> None:
    spec, ema = published(run, Artifact("experts/000"))
    with pytest.raises(CorruptArtifact):
        picture(run, spec, ema[:-1], 0, CPU)


def test_it_is_given_up_between_two_steps(run: Run) -> None:
    asked: list[bool] = []

    def given_up() -> bool:
        asked.append(len(asked) == 2)
        return len(asked) > 2

    assert picture(run, *published(run, expert(0)), 0, CPU, given_up=given_up) is None
    assert len(asked) < run.config.sample.steps + 2
