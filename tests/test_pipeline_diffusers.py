"""DDMPipeline as those who know diffusers use it: devices, dtypes, generators, latents, negative prompts."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ddm_ray.errors import SamplingError
from ddm_ray.pipeline import DDMPipeline
from ddm_ray.run.run import Run
from ddm_ray.sampling.noise import initial_noise
from tests.pretend_gpu import PretendGPU
from tests.random_run import make_run
from tests.sampling import tiny_components

pytestmark = pytest.mark.contract

LABELS = [3, 4, 5]
HALVES = [(torch.bfloat16, "bf16", 0.02), (torch.float16, "fp16", 0.005)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(str(tmp_path_factory.mktemp("manners") / "run"), num_rows=40)


@pytest.fixture(scope="module")
def pipeline(run: Run) -> DDMPipeline:
    return DDMPipeline.from_run(run)


@pytest.fixture
def painter(tmp_path: Path) -> DDMPipeline:
    """A pipeline of texts and latents, with its encoder and autoencoder."""
    return tiny_components.texts(tmp_path / "tokenizer")


def made(pipeline: DDMPipeline, **changes: Any) -> Tensor:
    call = {"class_labels": LABELS, "seeds": 0, "strategy": "full", "guidance_scale": 2.0, "output_type": "latent"}
    images = pipeline(**call | changes).images
    assert isinstance(images, Tensor)
    return images


def painted(pipeline: DDMPipeline, prompt: Any, **changes: Any) -> Tensor:
    call = {"seeds": 0, "num_inference_steps": 3, "strategy": "full", "guidance_scale": 3.0, "output_type": "latent"}
    images = pipeline(prompt, **call | changes).images
    assert isinstance(images, Tensor)
    return images


def off(actual: Tensor, right: Tensor) -> float:
    return float((actual - right).square().mean().sqrt() / right.square().mean().sqrt())


@pytest.mark.parametrize(("dtype", "word", "error"), HALVES, ids=["bf16", "fp16"])
def test_every_way_to_half_precision_is_one(
    run: Run, pipeline: DDMPipeline, tmp_path: Path, dtype: torch.dtype, word: str, error: float
) -> None:
    half = DDMPipeline.from_run(run, dtype=dtype)
    right = made(half)
    assert right.dtype == torch.float32
    assert 0 < off(right, made(pipeline)) < error
    pipeline.save_pretrained(tmp_path / "saved")
    ways = [
        DDMPipeline.from_run(run, dtype=word),
        DDMPipeline.from_run(run, "cpu", "mixture", None, word),
        DDMPipeline.from_run(run).to(dtype),
        DDMPipeline.from_run(run).to("cpu", dtype),
        DDMPipeline.from_run(run).to(device=torch.device("cpu"), dtype=word),
        DDMPipeline.from_pretrained(tmp_path / "saved", dtype=dtype),
        DDMPipeline.from_pretrained(tmp_path / "saved", dtype=word),
    ]
    for way in ways:
        assert (way.dtype, way.device) == (dtype, torch.device("cpu"))
        assert torch.equal(made(way), right)
    for offload in ("host", "disk"):
        offloaded = DDMPipeline.from_run(run, offload=offload, dtype=dtype)
        assert offloaded.dtype == dtype and off(made(offloaded), right) < 1e-4
    # What was rounded stays so.
    assert 0 < off(made(half.to(torch.float32)), made(pipeline)) < error


def test_text_encoder_and_experts_are_halved_and_images_are_not(painter: DDMPipeline, tmp_path: Path) -> None:
    right, pictures = painted(painter, ["a", "b"]), painted(painter, ["a", "b"], output_type="pt")
    painter.save_pretrained(tmp_path / "saved")
    loaded = DDMPipeline.from_pretrained(tmp_path / "saved", torch_dtype=torch.bfloat16)
    assert painter.to(torch.bfloat16) is painter
    parts = painter.components
    assert (painter.dtype, parts.text_encoder.model.dtype) == (torch.bfloat16, torch.bfloat16)
    assert parts.latents.autoencoder.dtype == torch.float32
    halved = painted(painter, ["a", "b"])
    assert torch.equal(painted(loaded, ["a", "b"]), halved)
    assert 0 < off(halved, right) < 0.1
    assert 0 < off(painted(painter, ["a", "b"], output_type="pt"), pictures) < 0.1
    # An autoencoder that somebody moved himself decodes, too.
    parts.latents.autoencoder.to(torch.bfloat16)
    assert off(painted(painter, ["a", "b"], output_type="pt"), pictures) < 0.1


def test_all_networks_move_to_the_device_and_back(painter: DDMPipeline) -> None:
    right = painted(painter, ["a", "b"], output_type="pt")
    with PretendGPU():
        assert painter.to("meta").device == torch.device("meta")
        parts = painter.components
        networks = [*parts.models.experts, parts.models.router, parts.text_encoder.model, parts.latents.autoencoder]
        assert {tensor.device.type for each in networks for tensor in each.parameters()} == {"meta"}
        assert painter.to("cpu").device == torch.device("cpu")
    images = painted(painter, ["a", "b"], output_type="pt")
    torch.testing.assert_close(images, right, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("arguments", "named", "message"),
    [
        (("cuda:99",), {}, "device 'cuda:99' isn't there: "),
        (("cpu", "cpu"), {}, "to takes one device and one dtype"),
        ((torch.float16,), {"dtype": torch.float32}, "to takes one device and one dtype"),
        ((torch.float64,), {}, r"unknown precision torch\.float64: use one of fp32 \(torch\.float32\), bf16"),
        ((), {"dtype": torch.int8}, r"unknown precision torch\.int8"),
    ],
)
def test_a_place_that_is_none_is_refused_and_nothing_moves(
    pipeline: DDMPipeline, arguments: tuple, named: dict, message: str
) -> None:
    with pytest.raises(SamplingError, match=message):
        pipeline.to(*arguments, **named)
    assert (pipeline.device.type, pipeline.dtype) == ("cpu", torch.float32)


def test_offloaded_experts_stay_where_they_are(run: Run) -> None:
    offloaded = DDMPipeline.from_run(run, offload="host")
    assert offloaded.to("cpu", torch.float32) is offloaded
    for move in (lambda: offloaded.to(torch.bfloat16), lambda: offloaded.to("meta")):
        with pytest.raises(SamplingError, match="offloaded experts stay where they are: open the pipeline with"):
            move()


def test_each_image_may_have_its_own_generator(pipeline: DDMPipeline) -> None:
    together = pipeline([*"123"], generator=[torch.Generator().manual_seed(n) for n in (7, 8, 9)])
    for number, prompt in enumerate("123"):
        alone = pipeline(prompt, generator=torch.Generator().manual_seed(7 + number))
        assert alone.seeds == together.seeds[number : number + 1]
    one_in_a_list = pipeline([*"12"], generator=[torch.Generator().manual_seed(7)])
    assert one_in_a_list.seeds == pipeline([*"12"], generator=torch.Generator().manual_seed(7)).seeds


@pytest.mark.parametrize("strategy", ["once", "full", "top-1"])
@pytest.mark.parametrize("offload", [None, "host"])
def test_latents_are_the_noise_that_images_begin_as(run: Run, strategy: str, offload: Any) -> None:
    pipeline = DDMPipeline.from_run(run, offload=offload)
    noise = initial_noise([5, 6, 7], pipeline.models.info.image_shape)
    right = made(pipeline, seeds=5, strategy=strategy)
    assert torch.equal(made(pipeline, seeds=5, strategy=strategy, latents=noise), right)
    for dtype in (torch.float64, torch.bfloat16):
        assert off(made(pipeline, seeds=5, strategy=strategy, latents=noise.to(dtype)), right) < 0.1
    turned = made(pipeline, seeds=5, strategy=strategy, latents=noise.flip(0), batch_size=2)
    assert off(turned, right) > 0.5
    parted = made(pipeline, seeds=5, strategy=strategy, latents=noise, batch_size=2)
    torch.testing.assert_close(parted, right, atol=1e-5, rtol=0)


def test_a_tuple_has_the_images_alone(pipeline: DDMPipeline) -> None:
    (images,) = pipeline(class_labels=LABELS, seeds=0, output_type="pt", return_dict=False)
    assert torch.equal(images, pipeline(class_labels=LABELS, seeds=0, output_type="pt").images)


def test_guidance_leads_away_from_the_negative_prompt(painter: DDMPipeline) -> None:
    """Away from another null condition: that of a pipeline which has this text as its own."""
    right = painted(painter, ["a", "b", "a"])
    for nothing in (None, "", ["", None, ""]):
        assert torch.equal(painted(painter, ["a", "b", "a"], negative_prompt=nothing), right)
    models, encoder = painter.models, painter.components.text_encoder
    own = {}
    for negative in "cd":
        other = replace(models.info, null_text=encoder.encode([negative]), trained_null=True)
        own[negative] = DDMPipeline(replace(models, info=other), text_encoder=encoder)
    assert off(painted(own["c"], ["a", "b", "a"]), right) > 0.001
    assert torch.equal(painted(painter, ["a", "b", "a"], negative_prompt="c"), painted(own["c"], ["a", "b", "a"]))
    mixed = painted(painter, ["a", "b", "a"], negative_prompt=["c", "d", ""], num_images_per_prompt=2)
    each = [own["c"], own["c"], own["d"], own["d"], painter, painter]
    for row, (one, prompt) in enumerate(zip(each, "aabbaa", strict=True)):
        alone = painted(one, prompt, seeds=row)
        torch.testing.assert_close(mixed[row], alone[0], atol=1e-5, rtol=0)


def test_a_bar_counts_steps_and_is_quiet_where_nobody_looks(
    pipeline: DDMPipeline, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    call = {"class_labels": LABELS, "seeds": 0, "batch_size": 2, "num_inference_steps": 4}
    pipeline(**call)
    assert capsys.readouterr() == ("", "")
    for offload in (None, "host"):
        shown = DDMPipeline.from_run(run, offload=offload)
        for config, counts in (({"disable": False}, ["0/8", "8/8"]), ({"disable": True}, [])):
            screen = io.StringIO()
            shown.set_progress_bar_config(file=screen, mininterval=0, **config)
            shown(**call)
            assert all(count in screen.getvalue() for count in counts)
            assert bool(screen.getvalue()) is bool(counts)


def test_its_words_tell_its_experts_and_where_they_are(run: Run, pipeline: DDMPipeline) -> None:
    assert repr(pipeline) == "DDMPipeline(2 experts, a router, images of 1 x 8 x 8, torch.float32 on cpu)"
    assert "1 experts, no router" in repr(DDMPipeline.from_run(run, model="monolith"))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"generator": [torch.Generator(), torch.Generator()]}, "2 generators for 3 images: give one each, or one"),
        ({"generator": [1, 2, 3]}, r"generator must be a torch\.Generator, or a list of them"),
        ({"generator": []}, r"generator must be a torch\.Generator, or a list of them"),
        ({"latents": torch.zeros(2, 1, 8, 8)}, r"shape \(2, 1, 8, 8\): these images begin as noise of \(3, 1, 8, 8\)"),
        ({"latents": torch.full((3, 1, 8, 8), float("nan"))}, "latents aren't finite"),
        ({"latents": [1.0]}, "latents are list: give a tensor of floats"),
        ({"latents": torch.zeros(3, 1, 8, 8, dtype=torch.int64)}, "latents are Tensor: give a tensor of floats"),
        ({"negative_prompt": "blurry"}, "negative_prompt: these models know classes, not texts: guidance_scale is all"),
    ],
)
def test_what_a_call_cannot_have_is_refused(pipeline: DDMPipeline, call: dict[str, Any], message: str) -> None:
    with pytest.raises(SamplingError, match=message) as raised:
        pipeline(class_labels=LABELS, **call)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("negative", "scale", "message"),
    [
        ("c", 1.0, "negative_prompt acts by guidance, and guidance_scale is 1: use more than 1"),
        (["c", "d"], 3.0, "2 negative prompts for 3 prompts: give one each, or one for all"),
        ([1, 2, 3], 3.0, "prompt 1 is no text"),
    ],
)
def test_a_negative_prompt_that_says_nothing_is_refused(
    painter: DDMPipeline, negative: Any, scale: float, message: str
) -> None:
    with pytest.raises(SamplingError, match=message):
        painted(painter, [*"abc"], negative_prompt=negative, guidance_scale=scale)
