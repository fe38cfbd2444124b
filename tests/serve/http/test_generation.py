"""Requests for images: what they resolve to, what is refused, and the form of the answer."""

import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image

from ddm_ray.config import SamplingSettings, load_recipe
from ddm_ray.errors import SamplingError
from ddm_ray.sampling.request import MixtureInfo, SampleResult
from ddm_ray.serve.engine.segments import Sampled
from ddm_ray.serve.http.generation import GenerationRequest, RequestError, resolve
from ddm_ray.serve.http.responses import image_file, images_response
from tests.random_run import TEXTS
from tests.test_sampling_settings import VALUES

CONFIG = load_recipe("tiny")
DEFAULTS = CONFIG.sample.changed(strategy="once")
INFO = MixtureInfo(2, (1, 8, 8), 10, torch.full((11, 2), 0.5, dtype=torch.float64))


def test_defaults_are_the_runs_own() -> None:
    generation = resolve(GenerationRequest(prompt=" 7 ", seed=5, n=3), CONFIG, DEFAULTS, INFO)
    sample = generation.sample
    assert sample.seeds == (5, 6, 7) and sample.condition.tolist() == [7, 7, 7]
    assert sample.settings == DEFAULTS
    assert (generation.upscaling, generation.bare) == (1, False)


def test_without_a_strategy_it_is_the_runs() -> None:
    generation = resolve(GenerationRequest(prompt="1"), CONFIG, DEFAULTS.changed(strategy="top-2"), INFO)
    assert generation.sample.settings.strategy == "top-2"


def test_settings_reach_the_sampler() -> None:
    request = GenerationRequest(
        class_label=3,
        **VALUES | {"strategy": "top-2"},
        size="64x64",
        model="tiny",
    )
    generation = resolve(request, CONFIG, DEFAULTS, INFO)
    sample = generation.sample
    assert sample.settings == SamplingSettings(**VALUES | {"strategy": "top-2"})
    assert sample.condition.tolist() == [3] and generation.upscaling == 8


def test_an_empty_prompt_is_unconditional() -> None:
    assert resolve(GenerationRequest(prompt=""), CONFIG, DEFAULTS, INFO).sample.condition.tolist() == [10]


def test_without_a_seed_each_request_has_its_own() -> None:
    seeds = {resolve(GenerationRequest(prompt="1"), CONFIG, DEFAULTS, INFO).sample.seeds for _ in range(8)}
    assert len(seeds) == 8


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"prompt": "cat"}, "prompt", "'cat'; prompt: one of 0, 1, 2, 3, 4, 5, 6, 7, 8, 9"),
        ({"class_label": 10}, "class_label", "0 to 9"),
        ({}, "prompt", "neither"),
        ({"prompt": "1", "class_label": 1}, "prompt", "both"),
        ({"prompt": "1", "strategy": "top-3"}, "strategy", "k from 1 to 2"),
        ({"prompt": "1", "strategy": "oracle"}, "strategy", "needs images whose cluster is known"),
        ({"prompt": "1", "size": "9x9"}, "size", "8x8"),
        ({"prompt": "1", "size": "large"}, "size", "8x8"),
        ({"prompt": "1", "size": "80000x80000"}, "size", "2048x2048"),
        ({"prompt": "1", "response_format": "png", "n": 2}, "n", "one image"),
    ],
)
def test_what_cannot_be_met_is_refused_by_field(fields: dict, param: str, words: str) -> None:
    with pytest.raises(RequestError) as refused:
        resolve(GenerationRequest(**fields), CONFIG, DEFAULTS, INFO)
    assert refused.value.param == param
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_a_text_needs_no_null_condition_unless_it_is_empty() -> None:
    config = load_recipe("laion256-k8", TEXTS)
    info = MixtureInfo(2, config.data.shape, None, None, trained_null=False)
    generation = resolve(GenerationRequest(prompt=" a bird "), config, config.sample, info)
    assert generation.prompt == "a bird"
    with pytest.raises(SamplingError, match="null condition"):
        resolve(GenerationRequest(prompt=" "), config, config.sample, info)
    for fields, param in (({"prompt": "a", "class_label": 1}, "class_label"), ({}, "prompt")):
        with pytest.raises(RequestError) as refused:
            resolve(GenerationRequest(**fields), config, config.sample, info)
        assert refused.value.param == param


def test_png_holds_the_image_upscaled_by_nearest_neighbours() -> None:
    image = torch.tensor([[[-1.0, 1.0], [0.0, 3.0]]])
    pixels = np.asarray(Image.open(io.BytesIO(image_file(image, 3))))
    assert pixels.shape == (6, 6) and pixels.dtype == np.uint8
    assert (pixels == np.kron([[0, 255], [128, 255]], np.ones((3, 3)))).all()


def test_png_of_three_channels_is_rgb() -> None:
    image = torch.stack([torch.full((2, 2), value) for value in (-1.0, 0.2, 1.0)])
    assert Image.open(io.BytesIO(image_file(image, 1))).getpixel((0, 0)) == (0, 153, 255)


def test_answer_pairs_images_with_seeds_and_experts() -> None:
    generation = resolve(GenerationRequest(prompt="1", n=2, seed=40), CONFIG, DEFAULTS, INFO)
    images_BCHW = torch.stack([torch.full((1, 8, 8), -1.0), torch.full((1, 8, 8), 1.0)])
    routing_SBK = torch.nn.functional.one_hot(torch.tensor([[0, 1], [0, 0]]), 2)
    result = SampleResult(images_BCHW, routing_SBK, 4, 0, (0, 1, 2))
    body = images_response(generation, Sampled(result, frozenset()), "tiny", 123)
    shades = [Image.open(io.BytesIO(base64.b64decode(item["b64_json"]))).getpixel((0, 0)) for item in body["data"]]
    assert shades == [0, 255] and [item["seed"] for item in body["data"]] == [40, 41]
    assert body["experts"] == [
        [{"expert": 0, "steps": 2}],
        [{"expert": 1, "steps": 1}, {"expert": 0, "steps": 1}],
    ]
    assert (body["created"], body["model"], body["strategy"]) == (123, "tiny", "once")
    degraded = images_response(generation, Sampled(result, frozenset({2, 1})), "tiny", 123)
    assert degraded == body | {"degraded": ["expert-001", "expert-002"]}
