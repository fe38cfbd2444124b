"""The dense tier: what the experts have no time for, by one network. No Ray."""

import asyncio
import base64
import io
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image

from ddm_ray.config import SamplingSettings
from ddm_ray.pipeline import DDMPipeline
from ddm_ray.sampling import driver
from ddm_ray.sampling.request import SampleRequest
from ddm_ray.sampling.run_models import ModelKind, Models, load_model, load_models, sampling_settings
from ddm_ray.sampling.trajectory import start
from ddm_ray.serve.engine import BatchEngine
from ddm_ray.serve.http import http_app
from ddm_ray.serve.meters import Meters
from ddm_ray.serve.scheduler import OverloadedError, Scheduler
from ddm_ray.serve.segments import LocalEngine, SegmentSampler
from ddm_ray.serve.service import Service
from ddm_ray.serve.versions import LiveSampler, Versions
from ddm_ray.storage.graph import MONOLITH, STUDENT
from ddm_ray.storage.run import Run
from tests.random_run import make_run, publish
from tests.serve.test_http_app import GENERATIONS, client, error_of, events


def live(models: Models, versions: Versions, full: bool) -> LiveSampler:
    """A sampler whose engine runs, or has as many images waiting as it takes."""
    scheduler = Scheduler(max_waiting_rows=2)
    engine = BatchEngine(partial(driver.answers, experts=models.experts, router=models.router), scheduler=scheduler)
    if full:
        request = SampleRequest((0, 1), torch.tensor([0, 1]), SamplingSettings(steps=2))
        engine.submit(start(request, models.info))
    else:
        engine.start()
    runner = LocalEngine(engine)
    return LiveSampler(versions.newest(), SegmentSampler(models.info, [runner] * len(models.experts), runner), engine)


class Tiers:
    """A run's application with both tiers, of which the engines of some are full."""

    def __init__(self, run: Run, *full: str, kind: ModelKind = "monolith"):
        mixture = live(load_models(run), Versions(run), "mixture" in full)
        dense = live(load_models(run, kind), Versions(run, dense=kind), kind in full)
        self.engines = [mixture.engine, dense.engine]
        self.meters = Meters(lambda: mixture.engine)
        service = Service(mixture, run.config, sampling_settings(run), self.meters, self._lacking, dense=dense)
        self.app = http_app(service)

    async def _lacking(self) -> list[str]:
        return []

    def ask(self, method: str, path: str, **request: Any) -> httpx.Response:
        async def asked() -> httpx.Response:
            async with client(self.app) as session:
                return await session.request(method, path, **request)

        return asyncio.run(asked())

    def generate(self, **body: Any) -> httpx.Response:
        return self.ask("POST", GENERATIONS, json={"prompt": "7", "seed": 3} | body)


@pytest.fixture(scope="module")
def idle(tiny_run: Run) -> Iterator[Tiers]:
    tiers = Tiers(tiny_run)
    yield tiers
    for engine in tiers.engines:
        engine.close()


@pytest.fixture(scope="module")
def busy(tiny_run: Run) -> Iterator[Tiers]:
    """The experts have no time."""
    tiers = Tiers(tiny_run, "mixture")
    yield tiers
    tiers.engines[1].close()


@pytest.fixture(scope="module")
def monolith_image(tiny_run: Run) -> np.ndarray:
    (image,) = DDMPipeline.from_run(tiny_run, model="monolith")(["7"], seeds=3).images
    return np.asarray(image).astype(int)


def is_image(encoded: bytes | str, right: np.ndarray) -> bool:
    data = base64.b64decode(encoded) if isinstance(encoded, str) else encoded
    return int(np.abs(np.asarray(Image.open(io.BytesIO(data))).astype(int) - right).max()) <= 1


def test_with_time_the_experts_answer(idle: Tiers, monolith_image: np.ndarray) -> None:
    answer = idle.generate().json()
    assert "dense" not in answer and answer["experts"][0] and answer["strategy"] == "once"
    assert not is_image(answer["data"][0]["b64_json"], monolith_image)


def test_without_time_the_monolith_answers_and_it_is_said(busy: Tiers, monolith_image: np.ndarray) -> None:
    answer = busy.generate()
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert (body["dense"], body["model"], body["strategy"], body["experts"]) == (
        "monolith",
        "tiny-monolith",
        None,
        [[]],
    )
    assert is_image(body["data"][0]["b64_json"], monolith_image)
    bare = busy.generate(response_format="png")
    assert is_image(bare.content, monolith_image) and bare.headers["x-dense"] == "monolith"
    *parts, end = events(busy.generate(stream=True, partial_images=2))
    assert len(parts) == 2 and end["dense"] == "monolith" and is_image(end["b64_json"], monolith_image)
    assert 'ddm_images_total{strategy="dense"} 3.0' in busy.ask("GET", "/metrics").text


def test_who_names_a_strategy_wants_the_experts(busy: Tiers) -> None:
    answer = busy.generate(strategy="top-1")
    assert answer.status_code == 429 and error_of(answer)["code"] == "overloaded"
    assert answer.headers["retry-after"]


def test_the_monolith_is_a_model_by_itself(idle: Tiers, monolith_image: np.ndarray) -> None:
    assert [model["id"] for model in idle.ask("GET", "/v1/models").json()["data"]] == ["tiny", "tiny-monolith"]
    assert idle.ask("GET", "/v1/models/tiny-monolith").json()["id"] == "tiny-monolith"
    assert idle.ask("GET", "/healthz").json()["weights"]["monolith"] == {"step": 300, "final": True}
    answer = idle.generate(model="tiny-monolith").json()
    assert answer["dense"] == "monolith" and is_image(answer["data"][0]["b64_json"], monolith_image)
    refused = idle.generate(model="tiny-monolith", strategy="full")
    assert (refused.status_code, error_of(refused)["param"]) == (400, "strategy")
    unknown = idle.generate(model="tiny-student")
    assert unknown.status_code == 404 and "'tiny' or 'tiny-monolith'" in error_of(unknown)["message"]


def test_a_student_is_a_dense_tier_too(tmp_path: Path) -> None:
    """One whose teacher was guided isn't guided again, whatever the run does."""
    guided = ("student.guidance_scale=2.0", "sample.guidance_scale=3.0")
    run = make_run(f"{tmp_path}/run", settings=guided, num_rows=60)
    publish(run, STUDENT, load_model(run, MONOLITH), 300, 4)
    tiers = Tiers(run, "mixture", kind="student")
    answer = tiers.generate().json()
    tiers.engines[1].close()
    assert (answer["dense"], answer["model"]) == ("student", "tiny-student")
    student = DDMPipeline.from_run(run, model="student")
    assert student.components.defaults.guidance_scale == 1
    (image,) = student(["7"], seeds=3).images
    assert is_image(answer["data"][0]["b64_json"], np.asarray(image).astype(int))
    (guided_again,) = student(["7"], seeds=3, guidance_scale=3.0).images
    assert not is_image(answer["data"][0]["b64_json"], np.asarray(guided_again).astype(int))


def test_where_both_are_full_it_is_refused(tiny_run: Run) -> None:
    answer = Tiers(tiny_run, "mixture", "monolith").generate()
    assert answer.status_code == 429 and error_of(answer)["code"] == "overloaded"


def test_who_has_seen_the_image_on_its_way_gets_no_other(idle: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    submit, submitted = idle.engines[0].submit, list[object]()

    def full_after_the_first(*parts: Any) -> Any:
        submitted.append(parts)
        if len(submitted) > 1:
            raise OverloadedError("no time", 1.0)
        return submit(*parts)

    monkeypatch.setattr(idle.engines[0], "submit", full_after_the_first)
    *parts, end = events(idle.generate(stream=True, partial_images=3))
    assert len(parts) == 1 and end["error"]["code"] == "overloaded"
