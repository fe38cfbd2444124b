"""A run of texts and latents, served with its text encoder and its autoencoder: the pipeline's images."""

import json
from collections.abc import Iterator

import numpy as np
import pytest

from ddm_ray.pipeline import DDMPipeline
from ddm_ray.run.run import Run
from ddm_ray.serve.cluster.args import ServeArgs
from tests.serve.conftest import Server, pixels, served
from tests.text_run import make_text_run

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def text_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_text_run(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def pipeline(text_run: Run) -> DDMPipeline:
    return DDMPipeline.from_run(text_run)


@pytest.fixture(scope="module", params=["multiplexed", pytest.param("per-expert", marks=pytest.mark.chaos)])
def server(request: pytest.FixtureRequest, text_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    args = ServeArgs(run=text_run.url, placement=request.param)
    with served(args, tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.mark.parametrize("strategy", ["once", "top-1", "full"])
def test_images_of_a_text_are_the_pipelines(server: Server, pipeline: DDMPipeline, strategy: str) -> None:
    settings = {"strategy": strategy, "guidance_scale": 3.0}
    answer = server.generate(prompt="a b", n=2, seed=3, **settings)
    assert answer.status == 200, answer.body
    images = pipeline("a b", num_images_per_prompt=2, seeds=3, **settings).images
    for item, image in zip(answer.json["data"], images, strict=True):
        assert pixels(item["b64_json"]).shape == (8, 8, 3)
        assert np.abs(pixels(item["b64_json"]) - np.asarray(image).astype(int)).max() <= 1
    other = pixels(server.generate(prompt="c", seed=3, **settings).json["data"][0]["b64_json"])
    assert np.abs(other - np.asarray(images[0]).astype(int)).max() > 1


def test_an_image_of_anything_and_one_on_its_way(server: Server, pipeline: DDMPipeline) -> None:
    assert server.ask("GET", "/readyz").json == {"status": "ok", "away": []}
    (right,) = pipeline("", seeds=3).images
    answer = server.generate(prompt="", seed=3, stream=True, partial_images=1)
    assert answer.status == 200
    assert answer.body.count(b"event: image_generation.partial_image") == 1
    *_, end = answer.body.decode().strip().split('"b64_json": "')
    assert np.abs(pixels(end.partition('"')[0]) - np.asarray(right).astype(int)).max() <= 1


def test_a_prompt_that_is_cut_off_says_so(server: Server) -> None:
    """Nine tokens are the encoder's, the first and the last of which aren't the prompt's."""
    fits, longer = ({"prompt": letters, "seed": 3} for letters in ("a b c d e f g", "a b c d e f g h i"))
    assert "truncated" not in server.generate(**fits).json
    cut = server.generate(**longer).json
    assert cut["truncated"] == {"tokens": 11, "kept": 9}
    assert cut["data"] == server.generate(**fits).json["data"]
    bare = [server.generate(**body, response_format="png").headers.get("x-truncated") for body in (fits, longer)]
    assert bare == [None, "9 of 11 tokens"]
    *_, end = server.generate(**longer, stream=True, partial_images=1).body.decode().strip().split("data: ")
    assert json.loads(end)["truncated"] == cut["truncated"]
