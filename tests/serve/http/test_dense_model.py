"""A dense network that is served beside the mixture: a model of its own, which requests name. No Ray."""

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from torch import Tensor

from ddm_ray.core.condition import Text
from ddm_ray.models.latents import Latents
from ddm_ray.models.text import TextEncoder
from ddm_ray.pipeline import DDMPipeline
from ddm_ray.run.graph import MONOLITH, STUDENT, expert
from ddm_ray.run.run import Run
from ddm_ray.sampling.run_models import ModelKind, load_models, load_trained, sampling_settings, settings_of
from ddm_ray.serve.engine.versions import Versions
from ddm_ray.serve.http.service import ServedModel
from tests.random_run import make_run, publish
from tests.serve.http.test_http_app import Served, error_of, events, live
from tests.text_run import make_text_run

pytestmark = pytest.mark.contract


class Both(Served):
    """A run's application with its mixture and a dense network, of which the engines of some are full."""

    def __init__(self, run: Run, *full: str, kind: ModelKind = "monolith", **codecs: Any):
        """`codecs`: encode and decode of Service."""
        mixture = live(load_models(run), Versions(run), sampling_settings(run), "mixture" in full)
        settings = settings_of(run, kind).changed(strategy=None)
        dense = live(load_models(run, kind), Versions(run, dense=kind), settings, kind in full)
        self.engines = [mixture.engine, dense.engine]
        models = {
            run.config.name: ServedModel(mixture),
            f"{run.config.name}-{kind}": ServedModel(dense, alone=True),
        }
        self._open(run, mixture, models, **codecs)

    def generate(self, **body: Any) -> httpx.Response:
        return super().generate(**{"prompt": "7", "seed": 3} | body)


@pytest.fixture(scope="module")
def both(tiny_run: Run) -> Iterator[Both]:
    served = Both(tiny_run)
    yield served
    for engine in served.engines:
        engine.close()


@pytest.fixture(scope="module")
def monolith_image(tiny_run: Run) -> np.ndarray:
    (image,) = DDMPipeline.from_run(tiny_run, model="monolith")(["7"], seeds=3).images
    return np.asarray(image).astype(int)


def is_image(encoded: bytes | str, right: np.ndarray) -> bool:
    data = base64.b64decode(encoded) if isinstance(encoded, str) else encoded
    return int(np.abs(np.asarray(Image.open(io.BytesIO(data))).astype(int) - right).max()) <= 1


def test_the_mixture_answers_where_no_model_is_named(both: Both, monolith_image: np.ndarray) -> None:
    for named in ({}, {"model": "tiny"}):
        answer = both.generate(**named).json()
        assert (answer["model"], answer["strategy"]) == ("tiny", "once") and answer["experts"][0]
        assert not is_image(answer["data"][0]["b64_json"], monolith_image)


def test_the_monolith_is_a_model_by_itself(both: Both, monolith_image: np.ndarray) -> None:
    listed = both.ask("GET", "/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["tiny", "tiny-monolith"]
    assert [len(model["experts"]) for model in listed] == [2, 0]
    assert both.ask("GET", "/v1/models/tiny-monolith").json()["id"] == "tiny-monolith"
    assert both.ask("GET", "/healthz").json()["weights"]["monolith"] == {"step": 300, "final": True}
    answer = both.generate(model="tiny-monolith").json()
    assert (answer["model"], answer["strategy"], answer["experts"]) == ("tiny-monolith", None, [[]])
    assert is_image(answer["data"][0]["b64_json"], monolith_image)
    assert is_image(both.generate(model="tiny-monolith", response_format="png").content, monolith_image)
    *parts, end = events(both.generate(model="tiny-monolith", stream=True, partial_images=2))
    assert len(parts) == 2 and is_image(end["b64_json"], monolith_image)
    assert 'ddm_images_total{strategy="dense"} 3.0' in both.ask("GET", "/metrics").text
    refused = both.generate(model="tiny-monolith", strategy="full")
    assert (refused.status_code, error_of(refused)["param"]) == (400, "strategy")
    unknown = both.generate(model="tiny-student")
    assert unknown.status_code == 404 and "'tiny' or 'tiny-monolith'" in error_of(unknown)["message"]


def test_a_request_for_a_model_that_has_no_time_is_refused(tiny_run: Run, monolith_image: np.ndarray) -> None:
    """None is answered by another model than it named."""
    for full, idle in (("mixture", "tiny-monolith"), ("monolith", "tiny")):
        served = Both(tiny_run, full)
        refused = served.generate(model="tiny" if full == "mixture" else "tiny-monolith")
        assert refused.status_code == 429 and error_of(refused)["code"] == "overloaded"
        assert refused.headers["retry-after"]
        assert served.generate(model=idle).status_code == 200
        served.engines[full == "mixture"].close()


def test_a_guided_student_is_not_guided_again(tmp_path: Path) -> None:
    """Whatever the run's own settings are; a request may ask for it all the same, as of the pipeline."""
    guided = ("student.guidance_scale=2.0", "sample.guidance_scale=3.0")
    run = make_run(f"{tmp_path}/run", settings=guided, num_rows=60)
    publish(run, STUDENT, load_trained(run, MONOLITH), 300, 4)
    served = Both(run, kind="student")
    student = DDMPipeline.from_run(run, model="student")
    assert student.components.defaults.guidance_scale == 1
    for scale in (None, 3.0):
        (image,) = student(["7"], seeds=3, guidance_scale=scale).images
        answer = served.generate(model="tiny-student", guidance_scale=scale).json()
        assert is_image(answer["data"][0]["b64_json"], np.asarray(image).astype(int))
    for engine in served.engines:
        engine.close()


def test_a_network_of_texts_needs_no_router(tmp_path: Path) -> None:
    run = make_text_run(tmp_path)
    publish(run, MONOLITH, load_trained(run, expert(0)), 3, 4)
    encoder, latents = TextEncoder.from_config(run.config.data.text), Latents.from_config(run.config.data.latents)

    async def encode(prompt: str) -> tuple[Text, int]:
        return encoder.encode([prompt]), encoder.lengths([prompt])[0]

    async def decode(latents_BCHW: Tensor) -> Tensor:
        return latents.decode(latents_BCHW)

    served = Both(run, encode=encode, decode=decode)
    answer = served.generate(prompt="a b", model=f"{run.config.name}-monolith")
    assert answer.status_code == 200, answer.text
    (image,) = DDMPipeline.from_run(run, model="monolith")("a b", seeds=3).images
    assert is_image(answer.json()["data"][0]["b64_json"], np.asarray(image).astype(int))
    for engine in served.engines:
        engine.close()
