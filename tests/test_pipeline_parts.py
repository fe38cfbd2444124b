"""A DDMPipeline's parts: what fits together is seen at once, and texts are encoded as seldom as can be."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL

from ddm_ray.config import SamplingSettings
from ddm_ray.core.condition import Text
from ddm_ray.errors import SamplingError
from ddm_ray.models.latents import Latents
from ddm_ray.models.text import TextEncoder
from ddm_ray.pipeline import DDMPipeline
from tests.random_run import make_run
from tests.sampling import tiny_components

QUICK = {"num_inference_steps": 2, "seeds": 1}


class Counting(TextEncoder):
    """Notes what it is asked to encode."""

    def __init__(self, encoder: TextEncoder) -> None:
        super().__init__(encoder.tokenizer, encoder.model, encoder.tokens)
        self.asked: list[tuple[str, ...]] = []

    def encode(self, prompts: Sequence[str]) -> Text:
        self.asked.append(tuple(prompts))
        return super().encode(prompts)


@pytest.fixture
def encoder(tmp_path: Path) -> Counting:
    return Counting(tiny_components.text_encoder(tmp_path / "tokenizer"))


def test_a_runs_folder_may_be_a_path(tmp_path: Path) -> None:
    make_run(str(tmp_path / "run"), num_rows=60)
    assert DDMPipeline.from_run(tmp_path / "run")("1", **QUICK).images


def test_prompts_are_encoded_once_and_batch_by_batch(encoder: Counting) -> None:
    pipeline = DDMPipeline(tiny_components.models("texts"), text_encoder=encoder)
    encoder.asked.clear()
    settings = {"num_inference_steps": 2, "seeds": 1, "output_type": "latent", "strategy": "full"}
    prompts = ["a", "b", "a", "c", None]
    images = pipeline(prompts, num_images_per_prompt=2, batch_size=4, **settings).images
    assert encoder.asked == [("a", "b"), ("c",), ("",)]
    one_by_one = [
        pipeline(prompt or "", **(settings | {"seeds": 1 + 2 * row}), num_images_per_prompt=2).images
        for row, prompt in enumerate(prompts)
    ]
    torch.testing.assert_close(images, torch.cat(one_by_one), atol=1e-4, rtol=0)


@pytest.mark.parametrize("prompt", [3, ["a", 3], b"a", ["a", ["b"]]])
def test_a_prompt_that_is_no_text_is_refused(encoder: Counting, prompt: object) -> None:
    pipeline = DDMPipeline(tiny_components.models("texts"), text_encoder=encoder)
    with pytest.raises(SamplingError, match=r"^prompt .* is no text: give a string, or a list of strings$"):
        pipeline(prompt, output_type="latent")


def test_the_empty_prompt_is_encoded_for_models_that_lack_it(encoder: Counting) -> None:
    models = tiny_components.models("texts")
    assert models.info.null_text is None
    pipeline = DDMPipeline(models, text_encoder=encoder)
    assert torch.equal(pipeline.models.info.null_text.tokens_BLE, encoder.null().tokens_BLE)
    assert pipeline("a", guidance_scale=3.0, output_type="latent", **QUICK).images.isfinite().all()


def test_latents_of_other_channels_are_refused_at_once(encoder: Counting) -> None:
    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
    eight = AutoencoderKL(**blocks, block_out_channels=[8, 8], norm_num_groups=4, latent_channels=8)
    with pytest.raises(SamplingError, match=r"autoencoder has 8 latent channels, .* shape \(4, 8, 8\)"):
        DDMPipeline(tiny_components.models("texts"), text_encoder=encoder, latents=Latents(eight, 1.0))


def test_a_text_encoder_of_another_width_is_refused_at_once(encoder: Counting) -> None:
    before = tiny_components.models("texts")
    wide = Text(torch.zeros(1, 9, 20), torch.ones(1, 9, dtype=torch.bool))
    models = replace(before, info=replace(before.info, null_text=wide))
    with pytest.raises(SamplingError, match="text encoder gives 20 channels, the models take 12"):
        DDMPipeline(models, text_encoder=encoder)


def test_a_model_of_texts_says_what_to_give(encoder: Counting) -> None:
    with pytest.raises(SamplingError, match="these models know texts, not classes: give prompt in place of"):
        DDMPipeline(tiny_components.models("texts"), text_encoder=encoder)(class_labels=[1], output_type="latent")
    bare = DDMPipeline(tiny_components.models("texts"))
    with pytest.raises(SamplingError, match="this pipeline has no text_encoder: give it one, or a prompt that is enc"):
        bare("a cat", output_type="latent")


@pytest.mark.parametrize("output_type", ["pil", "np", "pt"])
def test_channels_that_are_no_picture_are_refused(encoder: Counting, output_type: str) -> None:
    pipeline = DDMPipeline(tiny_components.models("texts"), text_encoder=encoder)
    with pytest.raises(SamplingError, match=r"4 channels are no picture .*: use output_type latent"):
        pipeline("a", output_type=output_type)


def test_the_routers_temperature_is_a_setting_as_others_are(tmp_path: Path) -> None:
    models = tiny_components.models()
    hot = DDMPipeline(models, defaults=SamplingSettings(strategy="full", router_temperature=5.0))
    pipeline_inputs = {"class_labels": [0, 1], "output_type": "latent", **QUICK}
    images = hot(**pipeline_inputs).images
    cool = DDMPipeline(models, defaults=SamplingSettings(strategy="full"))
    assert not torch.equal(images, cool(**pipeline_inputs).images)
    assert torch.equal(images, cool(**pipeline_inputs, router_temperature=5.0).images)
    hot.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved/model_index.json").read_text().count("router_temperature") == 1
    assert torch.equal(DDMPipeline.from_pretrained(tmp_path / "saved")(**pipeline_inputs).images, images)
