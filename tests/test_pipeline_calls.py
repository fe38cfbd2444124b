"""What a DDMPipeline may be asked for, and how it refuses what it can't do: on a run of untrained models."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ddm_ray.config import SamplingSettings
from ddm_ray.core.condition import Text
from ddm_ray.errors import SamplingError
from ddm_ray.pipeline import DDMPipeline
from ddm_ray.sampling.output import OutputType
from tests.random_run import make_run
from tests.test_sampling_settings import VALUES

TEXT = Text(torch.zeros(1, 2, 3), torch.ones(1, 2, dtype=torch.bool))


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> DDMPipeline:
    return DDMPipeline.from_run(make_run(str(tmp_path_factory.mktemp("calls") / "run")))


def pixels(pipeline: DDMPipeline, labels, **kwargs) -> torch.Tensor:
    return pipeline(class_labels=labels, output_type="pt", **kwargs).images


def test_a_class_may_be_asked_for_by_prompt(pipeline: DDMPipeline) -> None:
    expected = pixels(pipeline, ["3", None, None, "9"], seeds=4)
    assert torch.equal(pipeline(["3", "", None, "9"], seeds=4, output_type="pt").images, expected)
    (alone,) = pipeline("3", seeds=4, output_type="pt").images
    torch.testing.assert_close(alone, expected[0], atol=1e-5, rtol=0)
    for label in (3, [3], np.array([3]), np.int64(3), torch.tensor(3), torch.tensor([3]), [torch.tensor(3)]):
        assert torch.equal(pixels(pipeline, label, seeds=4)[0], alone)
    assert pipeline(["3", ""], seeds=4).prompts == ("3", "")


def test_many_images_of_a_prompt_count_their_seeds_on(pipeline: DDMPipeline) -> None:
    output = pipeline(["3", "8"], num_images_per_prompt=2, seeds=5, output_type="pt")
    assert output.seeds == (5, 6, 7, 8)
    assert output.prompts == ("3", "3", "8", "8")
    assert torch.equal(output.images, pixels(pipeline, ["3", "3", "8", "8"], seeds=5))


@pytest.mark.parametrize("output_type", ["pil", "pt", "np"])
def test_what_is_saved_can_be_seen_and_what_is_printed_is_short(
    pipeline: DDMPipeline, tmp_path: Path, output_type: OutputType
) -> None:
    output = pipeline(["3", "3", ""], seeds=5, num_inference_steps=2, output_type=output_type)
    assert repr(output) == "DDMOutput(3 images of seeds 5, 6, 7, sampled by 2 experts in 2 steps)"
    output.save(tmp_path / "all.webp")
    with Image.open(tmp_path / "all.webp") as picture:
        assert picture.width > 2 * 48 and picture.height > 2 * 48
        assert len(picture.convert("L").getcolors() or ()) > 20
    with pytest.raises(SamplingError, match=r"all\.txt: name a \.png or "):
        output.save(tmp_path / "all.txt")
    printed = (pipeline, pipeline.models, pipeline.components, pipeline.models.info, TEXT)
    assert [len(repr(each).splitlines()) for each in printed] == [1] * 5
    assert max(len(repr(each)) for each in printed) < 800


def test_latents_are_not_saved_as_a_picture(pipeline: DDMPipeline, tmp_path: Path) -> None:
    with pytest.raises(SamplingError, match="latents are no pictures"):
        pipeline("3", seeds=1, num_inference_steps=1, output_type="latent").save(tmp_path / "x.png")


def test_an_unknown_argument_lists_the_known_ones(pipeline: DDMPipeline) -> None:
    with pytest.raises(SamplingError) as refused:
        pipeline("3", height=256)
    known = str(refused.value).removeprefix("height: unknown key; known are ").split(", ")
    assert {"prompt", "class_labels", "seeds", "num_inference_steps", "strategy", "guidance_scale"} < {*known}


def test_seeds_and_counts_may_be_numpys_and_torchs(pipeline: DDMPipeline) -> None:
    expected = pixels(pipeline, [3, 8], seeds=[5, 6], num_inference_steps=2, guidance_interval=(0, 1))
    for seeds in (np.int64(5), np.array([5, 6]), torch.tensor(5), torch.tensor([5, 6]), range(5, 7)):
        output = pipeline(class_labels=[3, 8], seeds=seeds, num_inference_steps=np.int32(2), output_type="pt")
        assert output.seeds == (5, 6)
        assert torch.equal(output.images, expected)
    array = np.array([0.0, 1.0])
    assert torch.equal(pixels(pipeline, [3, 8], seeds=5, num_inference_steps=2, guidance_interval=array), expected)
    clusters = torch.tensor([1, 0])
    output = pipeline(class_labels=[3, 8], strategy="oracle", clusters=clusters, num_inference_steps=1)
    assert output.experts_SB.tolist() == [[1, 0]]


def test_a_temperature_flattens_the_routers_posterior(pipeline: DDMPipeline) -> None:
    """Logits / T: the ratio of two experts' weights at the first step is that of T = 1, to the power 1 / T."""
    plain, flat = (
        pipeline(class_labels=[3, 8], strategy="full", seeds=0, router_temperature=temperature).routing_SBK[0].log()
        for temperature in (1.0, 4.0)
    )
    torch.testing.assert_close(flat[:, 0] - flat[:, 1], (plain[:, 0] - plain[:, 1]) / 4)


def test_seeds_are_drawn_from_a_generator(pipeline: DDMPipeline) -> None:
    first, second = (pipeline([*"123"], generator=torch.Generator().manual_seed(2)) for _ in range(2))
    assert first.seeds == second.seeds
    assert len(set(first.seeds)) == 3
    assert pipeline([*"123"], generator=torch.Generator().manual_seed(3)).seeds != first.seeds


def test_the_oracle_is_told_the_cluster(pipeline: DDMPipeline) -> None:
    output = pipeline(["1", "2"], strategy="oracle", clusters=[1, 0], num_images_per_prompt=2, num_inference_steps=2)
    assert output.experts_SB.tolist() == [[1, 1, 0, 0]] * 2
    assert not pipeline(["1", "2"], strategy="oracle", clusters=0).experts_SB.any()


def test_every_setting_reaches_the_sampler_from_the_call_and_from_the_defaults(pipeline: DDMPipeline) -> None:
    assert VALUES.keys() == SamplingSettings.model_fields.keys()
    plain = {"seeds": 1, "strategy": "full", "guidance_scale": 3.0}
    images = pixels(pipeline, ["1", "2"], **plain)
    for name, value in VALUES.items():
        assert (pixels(pipeline, ["1", "2"], **plain | {name: value}) - images).abs().max() > 1e-4, name
    own = DDMPipeline(pipeline.models, class_names=pipeline.components.class_names, defaults=SamplingSettings(**VALUES))
    called = pixels(pipeline, ["1"], seeds=1, **VALUES)
    assert torch.equal(pixels(own, ["1"], seeds=1), called)
    nothing = dict.fromkeys(VALUES)
    assert torch.equal(pixels(own, ["1"], seeds=1, **nothing), called)
    assert torch.equal(pixels(own, ["1"], seeds=1, num_inference_steps=VALUES["steps"], steps=9), called)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"class_labels": ["cat"]}, r"unknown class 'cat': use a name \(0, 1, .*\) or a number from 0 to 9"),
        ({"class_labels": [-1]}, "unknown class -1"),
        ({"strategy": "top-3"}, "unknown strategy 'top-3' for 2 experts"),
        ({"num_inference_steps": 0}, "^steps: Input should be greater than 0, got 0"),
        ({"colour": "red"}, "^colour: unknown key"),
        ({"seeds": [1, 2]}, "2 seeds for 1 images"),
        ({"seeds": 1, "generator": torch.Generator()}, "give either seeds or a generator"),
        ({"strategy": "oracle"}, "strategy oracle, and no other, needs clusters: the strategy is oracle"),
        ({"strategy": "oracle", "clusters": 2}, "clusters are 2: use whole numbers from 0 to 1"),
        ({"strategy": "oracle", "clusters": [0, -1]}, "2 clusters for 1 prompts: give one each"),
        ({"strategy": "oracle", "clusters": "0"}, "clusters are '0': use whole numbers"),
        ({"clusters": [0]}, "strategy oracle, and no other, needs clusters: the strategy is once"),
        ({"output_type": "jpg"}, "unknown output_type 'jpg'"),
        ({"prompt": "1"}, "give either prompt or class_labels: one"),
        ({"class_labels": None, "prompt": ["1", 2]}, "give numbers as class_labels"),
        ({"class_labels": None, "prompt": TEXT}, "conditioned on class labels"),
        ({"batch_size": 2.0}, r"batch_size is 2\.0: use a whole number"),
        ({"seeds": "1"}, "seeds are '1': use whole numbers"),
        ({"seeds": True}, "seeds are True: use whole numbers"),
        ({"class_labels": [1, 2, 3], "batch_size": 1, "seeds": [0, 1, -1]}, "seeds must be from 0"),
        ({"class_labels": torch.tensor([1.0])}, r"unknown class 1\.0"),
        ({"class_labels": None, "prompt": []}, "prompt is empty"),
    ],
)
def test_what_cannot_be_met_is_said_in_one_line(
    pipeline: DDMPipeline, arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(SamplingError, match=message) as raised:
        pipeline(**({"class_labels": ["1"]} | arguments))
    assert "\n" not in str(raised.value)
