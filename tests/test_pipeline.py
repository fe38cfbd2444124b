"""DDMPipeline on a finished run of untrained models."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ddm_ray.config import load_recipe
from ddm_ray.core.times import time_grid
from ddm_ray.errors import CorruptArtifact, MissingArtifact, RunError, SamplingError
from ddm_ray.jobs.attempts import claim
from ddm_ray.models import weights
from ddm_ray.models.spec import denoiser_spec
from ddm_ray.pipeline import DDMPipeline
from ddm_ray.run.graph import MONOLITH, Artifact
from ddm_ray.run.run import Run
from ddm_ray.sampling.run_models import load_trained, mixture_info, monolith_info
from tests.infos import commit_written, info_of
from tests.published import publish_weights
from tests.random_run import make_run
from tests.sampling import tiny_components

pytestmark = pytest.mark.contract

LABELS = ["3", 1, None, "9", 0, "3"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(str(tmp_path_factory.mktemp("pipeline") / "run"))


@pytest.fixture(scope="module")
def pipeline(run: Run) -> DDMPipeline:
    return DDMPipeline.from_run(run)


@pytest.fixture(scope="module")
def monolith(run: Run) -> DDMPipeline:
    return DDMPipeline.from_run(run.url, model="monolith")


def pixels(pipeline: DDMPipeline, labels, **kwargs) -> torch.Tensor:
    return pipeline(class_labels=labels, output_type="pt", **kwargs).images


@pytest.mark.parametrize("strategy", ["once", "full"])
def test_an_image_depends_on_its_seed_and_not_on_its_batch(pipeline: DDMPipeline, strategy: str) -> None:
    settings = {"strategy": strategy, "guidance_scale": 2.5, "num_inference_steps": 4}
    together = pixels(pipeline, LABELS, seeds=7, **settings)
    apart = pixels(pipeline, LABELS, seeds=7, batch_size=1, **settings)
    turned = pixels(pipeline, LABELS[::-1], seeds=[12, 11, 10, 9, 8, 7], batch_size=4, **settings)
    assert together.std() > 0.05
    torch.testing.assert_close(apart, together, atol=1e-5, rtol=0)
    torch.testing.assert_close(turned.flip(0), together, atol=1e-5, rtol=0)


def test_labels_by_name_and_by_number_agree(tmp_path: Path) -> None:
    names = "data.class_names=[zero, one, two, three, four, five, six, seven, eight, nine]"
    pipeline = DDMPipeline.from_run(make_run(str(tmp_path / "run"), settings=(names,), num_rows=60))
    assert torch.equal(pixels(pipeline, ["seven", "two"], seeds=1), pixels(pipeline, [7, 2], seeds=1))
    with pytest.raises(SamplingError, match=r"unknown class '7': use a name \(zero, one"):
        pipeline(class_labels=["7"])


def test_no_label_is_unconditional(pipeline: DDMPipeline) -> None:
    unconditional = pixels(pipeline, ["4", "5"], seeds=1, guidance_scale=0)
    assert torch.equal(pixels(pipeline, [None, None], seeds=1), unconditional)
    assert not torch.equal(pixels(pipeline, ["4", "5"], seeds=1), unconditional)


def test_output_types_hold_the_same_images(pipeline: DDMPipeline) -> None:
    tensor = pipeline(class_labels=LABELS, seeds=3, output_type="pt").images
    array = pipeline(class_labels=LABELS, seeds=3, output_type="np").images
    pictures = pipeline(class_labels=LABELS, seeds=3).images
    assert tensor.shape == (6, 1, 8, 8)
    assert 0 <= tensor.min() < tensor.max() <= 1
    assert np.array_equal(array, tensor.permute(0, 2, 3, 1).numpy())
    assert all(isinstance(picture, Image.Image) and picture.mode == "L" for picture in pictures)
    for picture, image in zip(pictures, tensor, strict=True):
        assert np.abs(np.asarray(picture) / 255 - image[0].numpy()).max() <= 0.5 / 255 + 1e-6


def test_what_is_not_given_is_the_runs_setting(run: Run, pipeline: DDMPipeline) -> None:
    settings = run.config.sample
    output = pipeline(class_labels=["1", "2"], seeds=0)
    assert output.experts_SB.shape == (settings.steps, 2)
    assert (output.num_expert_rows, output.num_router_rows) == (2 * settings.steps, 0)
    assert (output.experts_SB == output.experts_SB[0]).all()


def test_random_seeds_are_told_and_reproduce(pipeline: DDMPipeline) -> None:
    first = pipeline(class_labels=["1", "1"], output_type="pt")
    assert first.seeds[0] != first.seeds[1]
    assert pipeline(class_labels=["1"]).seeds[0] not in first.seeds
    torch.testing.assert_close(pixels(pipeline, ["1", "1"], seeds=first.seeds), first.images)


def test_the_monolith_is_one_model_without_router(pipeline: DDMPipeline, monolith: DDMPipeline) -> None:
    output = monolith(class_labels=LABELS, seeds=3, output_type="pt")
    assert not output.experts_SB.any()
    assert output.num_router_rows == 0
    assert (output.images - pixels(pipeline, LABELS, seeds=3)).abs().mean() > 0.01
    with pytest.raises(SamplingError, match="a single network has no experts to choose from"):
        monolith(class_labels=["1"], strategy="full")


def test_the_output_tells_which_expert_painted_when(pipeline: DDMPipeline, tmp_path: Path) -> None:
    output = pipeline(class_labels=LABELS, strategy="full", num_inference_steps=25)
    assert output.routing_SBK.shape == (25, 6, 2)
    torch.testing.assert_close(output.routing_SBK.sum(2), torch.ones(25, 6))
    assert torch.equal(output.times_S, time_grid("uniform", 25)[:-1])
    output.plot_routing(tmp_path / "routing.png")
    assert Image.open(tmp_path / "routing.png").size[0] > 1000


@pytest.mark.parametrize("offload", ["disk", "host"])
def test_offloaded_experts_paint_the_same_images(run: Run, pipeline: DDMPipeline, offload: str) -> None:
    offloaded = DDMPipeline.from_run(run, offload=offload)
    for strategy in ("once", "full"):
        expected = pixels(pipeline, LABELS, seeds=2, strategy=strategy)
        torch.testing.assert_close(pixels(offloaded, LABELS, seeds=2, strategy=strategy), expected, atol=1e-5, rtol=0)
    with pytest.raises(SamplingError, match="unknown offload 'cloud'"):
        DDMPipeline.from_run(run, offload="cloud")


def test_without_a_finished_router_the_strategies_that_need_none_work(
    run: Run, pipeline: DDMPipeline, tmp_path: Path
) -> None:
    folder = copied(run, tmp_path / "run")
    (folder / "router" / "_MANIFEST.json").unlink()
    without = DDMPipeline.from_run(str(folder))
    assert torch.equal(pixels(without, LABELS, seeds=1), pixels(pipeline, LABELS, seeds=1, strategy="once"))
    assert without("1", strategy="oracle", clusters=1).images
    with pytest.raises(SamplingError, match="'full' needs the router, which isn't there: use once or oracle"):
        without("1", strategy="full")


def test_a_run_of_texts_and_latents_brings_its_encoder_and_autoencoder(tmp_path: Path) -> None:
    encoder = tiny_components.text_encoder(tmp_path / "text")
    encoder.tokenizer.save_pretrained(tmp_path / "text")
    encoder.model.save_pretrained(tmp_path / "text")
    tiny_components.autoencoder().save_pretrained(tmp_path / "vae")
    text = f"data.text={{encoder: {tmp_path / 'text'}, tokens: 9, dim: 12}}"
    latents = f"data.latents={{autoencoder: {tmp_path / 'vae'}, downsampling: 2, scale: 0.5}}"
    settings = ("data.class_names=[]", text, latents, "data.channels=4", "expert.model.analytic_skip=null")
    run = Run.create(str(tmp_path / "run"), load_recipe("tiny", settings))
    spec = denoiser_spec(run.config)
    tensors, text = weights.weights_as_bytes(weights.build(spec), spec)
    files = {"ema.safetensors": tensors, "model.json": text.encode()}
    prefix, _ = publish_weights(claim(run.store, "monolith"), 1, run.identity(MONOLITH), files)
    commit_written(run, Artifact("monolith"), [f"{prefix}/{name}" for name in files], info_of(MONOLITH, weights=prefix))
    pipeline = DDMPipeline.from_run(run, model="monolith")
    output = pipeline(["a cat", ""], seeds=1, guidance_scale=3.0)
    assert [(image.mode, image.size) for image in output.images] == [("RGB", (16, 16))] * 2
    assert output.num_expert_rows == 2 * 2 * run.config.sample.steps
    assert not output.experts_SB.any()


def test_unknown_model_and_no_run(run: Run, tmp_path: Path) -> None:
    with pytest.raises(SamplingError, match="unknown model 'teacher'"):
        DDMPipeline.from_run(run, model="teacher")
    with pytest.raises(RunError, match="is not a run"):
        DDMPipeline.from_run(str(tmp_path))


def test_the_prior_is_that_of_the_training_rows(run: Run) -> None:
    counts_CK = torch.tensor(run.require(Artifact("partition")).info["counts_CK"], dtype=torch.float64)
    info = mixture_info(run)
    assert (info.num_experts, info.num_classes, info.image_shape) == (2, 10, (1, 8, 8))
    torch.testing.assert_close(info.prior_CK[:10], counts_CK / counts_CK.sum(1, keepdim=True))
    torch.testing.assert_close(info.prior_CK[10], counts_CK.sum(0) / counts_CK.sum())
    assert monolith_info(run).prior_CK.tolist() == [[1.0]] * 11


def copied(run: Run, path: Path) -> Path:
    shutil.copytree(run.url, path)
    return path


def test_an_altered_weight_is_named(run: Run, tmp_path: Path) -> None:
    folder = copied(run, tmp_path / "run")
    (weights,) = folder.glob("experts/001/attempts/*/weights/*/ema.safetensors")
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(bytes(data))
    with pytest.raises(CorruptArtifact, match=r"experts/001/.*/ema\.safetensors: checksum"):
        DDMPipeline.from_run(str(folder))
    assert DDMPipeline.from_run(str(folder), model="monolith")("1").images


def test_an_expert_that_is_not_trained_is_named(run: Run, tmp_path: Path) -> None:
    folder = copied(run, tmp_path / "run")
    (folder / "experts" / "001" / "_MANIFEST.json").unlink()
    with pytest.raises(MissingArtifact, match=r"experts/001 yet; make experts/001$"):
        DDMPipeline.from_run(str(folder))


def test_the_manifest_says_which_weights_count(run: Run, tmp_path: Path) -> None:
    """A later attempt's weights, published but not committed, are not read."""
    folder = copied(run, tmp_path / "run")
    own = Run.open(str(folder))
    before = load_trained(own, Artifact("monolith")).state_dict()
    later = claim(own.store, "monolith")
    publish_weights(later, 999, own.identity(MONOLITH), {"ema.safetensors": b"", "model.json": b"{}"})
    after = load_trained(own, Artifact("monolith")).state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not load_trained(own, Artifact("monolith")).training


def test_it_needs_neither_ray_nor_deepspeed_nor_a_compiler(run: Run) -> None:
    absent = ["ray", "deepspeed", "faiss", "sklearn", "diffusers", "transformers", "matplotlib", "torch._dynamo"]
    script = (
        f"import sys; sys.modules.update(dict.fromkeys({absent}))\n"
        "from ddm_ray.pipeline import DDMPipeline\n"
        "print(len(DDMPipeline.from_run(sys.argv[1])(['1', '2'], strategy='full').images))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, run.url], capture_output=True, text=True, cwd=Path(__file__).parents[1]
    )
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr


@pytest.mark.parametrize("device", ["cuda:99", "foo"])
def test_a_device_that_is_not_there_is_told(tmp_path: Path, device: str) -> None:
    for opening in (DDMPipeline.from_run, DDMPipeline.from_pretrained):
        with pytest.raises(SamplingError, match=f"device '{device}' isn't there: .*; choose cpu"):
            opening(str(tmp_path), device=device)
