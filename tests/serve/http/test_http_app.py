"""The HTTP application and its door, in this process: forms of answers, refusals, streams, tokens, limits. No Ray."""

import asyncio
import gzip
import json
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from ray.exceptions import RayTaskError

from ddm_ray.config import SamplingSettings
from ddm_ray.errors import CorruptArtifact, NotFiniteError, StorageError
from ddm_ray.pipeline import DDMPipeline
from ddm_ray.run.run import Run
from ddm_ray.sampling import driver
from ddm_ray.sampling.request import SampleRequest
from ddm_ray.sampling.run_models import Models, load_models, sampling_settings
from ddm_ray.sampling.trajectory import start
from ddm_ray.serve.engine.batch_engine import BatchEngine
from ddm_ray.serve.engine.live_sampler import LiveSampler
from ddm_ray.serve.engine.local_runner import LocalRunner
from ddm_ray.serve.engine.scheduler import Scheduler
from ddm_ray.serve.engine.segments import SegmentSampler
from ddm_ray.serve.engine.versions import Versions
from ddm_ray.serve.http import routes
from ddm_ray.serve.http.generation import MAX_WORK
from ddm_ray.serve.http.guard import Guard
from ddm_ray.serve.http.meters import Meters
from ddm_ray.serve.http.routes import http_app
from ddm_ray.serve.http.service import ServedModel, Service
from tests.serve.conftest import pixels

GENERATIONS = "/v1/images/generations"
Ask = Callable[..., Awaitable[httpx.Response]]


def live(models: Models, versions: Versions, defaults: SamplingSettings, full: bool = False) -> LiveSampler:
    """A sampler whose engine runs, or (`full`) has as many images waiting as it takes."""
    scheduler = Scheduler(max_waiting_rows=2) if full else Scheduler()
    engine = BatchEngine(partial(driver.answers, experts=models.experts, router=models.router), scheduler=scheduler)
    if full:
        request = SampleRequest((0, 1), torch.tensor([0, 1]), SamplingSettings(steps=2))
        engine.submit(start(request, models.info))
    else:
        engine.start()
    runner = LocalRunner(engine)
    sampler = SegmentSampler(models.info, [runner] * len(models.experts), runner)
    return LiveSampler(versions.newest(), sampler, engine, defaults)


class Served:
    """A run behind its application, with one engine of all experts."""

    def __init__(self, run: Run, **codecs: Any):
        """`codecs`: encode and decode of Service."""
        sampler = live(load_models(run), Versions(run), sampling_settings(run))
        self._open(run, sampler, {run.config.name: ServedModel(sampler)}, **codecs)

    def _open(self, run: Run, mixture: LiveSampler, models: dict[str, ServedModel], **codecs: Any) -> None:
        self.mixture, self.sampler, self.engine, self.away = mixture, mixture._now.sampler, mixture.engine, list[str]()
        self.service = Service(run.config, models, Meters(lambda: self.engine), self._lacking, **codecs)
        self.app = http_app(self.service)

    async def _lacking(self) -> list[str]:
        return self.away

    def ask(self, method: str, path: str, guard: Guard | None = None, **request: Any) -> httpx.Response:
        async def asked() -> httpx.Response:
            async with client(guard or Guard(self.app)) as session:
                return await session.request(method, path, **request)

        return asyncio.run(asked())

    def generate(self, **body: Any) -> httpx.Response:
        return self.ask("POST", GENERATIONS, json=body)


@asynccontextmanager
async def client(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://served") as session:
        yield session


@pytest.fixture(scope="module")
def served(tiny_run: Run) -> Iterator[Served]:
    made = Served(tiny_run)
    yield made
    made.engine.close()


def error_of(answer: httpx.Response) -> dict[str, Any]:
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"} and len(error["message"]) < 1000
    return error


def test_images_are_the_pipelines(served: Served, tiny_run: Run) -> None:
    answer = served.generate(prompt="7", n=3, seed=5, strategy="top-1", num_inference_steps=4)
    right = DDMPipeline.from_run(tiny_run)(["7"] * 3, seeds=5, strategy="top-1", num_inference_steps=4)
    assert answer.status_code == 200
    for item, image in zip(answer.json()["data"], right.images, strict=True):
        assert np.abs(pixels(item["b64_json"]) - np.asarray(image).astype(int)).max() <= 1
    assert "degraded" not in answer.json()


def test_a_label_may_come_with_an_empty_prompt(served: Served) -> None:
    by_label = served.generate(prompt="", class_label=3, seed=1).json()["data"]
    assert by_label == served.generate(prompt="3", seed=1).json()["data"]
    assert by_label != served.generate(prompt="", seed=1).json()["data"]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"n": "3"}, "n", "valid integer"),
        ({"prompt": ["1"]}, "prompt", "valid string"),
        ({"response_format": "url"}, "response_format", "'b64_json' or 'png'"),
        ({"strategy": "top-" + "1" * 5000}, "strategy", "unknown strategy 'top-111"),
        ({"strategy": "nucleus-0." + "0" * 50 + "1"}, "strategy", "nucleus"),
        ({"model": "x" * 10_000}, "model", "isn't served here"),
        ({"prompt": "cat"}, "prompt", "unknown class 'cat'; prompt: one of 0, 1, 2"),
        ({"step": 5}, "step", "step: Extra inputs are not permitted"),
        ({"x" * 10_000: 1}, "x" * 60, "Extra inputs"),
        ({"steps": 5, "num_inference_steps": 6}, None, "give one"),
        ({"partial_images": 2}, "partial_images", "give stream true"),
        ({"partial_images": 51, "stream": True}, "partial_images", "less than or equal to 50"),
        ({"partial_images": 5, "stream": True, "size": "2048x2048"}, "partial_images", "at most 4 of this size"),
        ({"routing": True, "response_format": "png"}, "routing", "not in a bare png"),
        ({"stream": True, "n": 2}, "n", "a stream carries one image"),
        ({"stream": True, "response_format": "png"}, "response_format", "a stream carries b64_json"),
        ({"timeout": 0}, "timeout", "greater than 0"),
        ({"n": 10, "steps": 1000, "solver": "heun", "strategy": "full", "guidance_scale": 2.0}, "steps", str(MAX_WORK)),
    ],
)  # fmt: skip
def test_refusals_name_the_field(served: Served, body: dict[str, Any], param: str | None, words: str) -> None:
    answer = served.generate(**{"prompt": "1"} | body)
    error = error_of(answer)
    assert answer.status_code in (400, 404)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert words in error["message"]


@pytest.mark.parametrize("content_type", ["application/json", "Application/JSON", "application/vnd.api+json"])
@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        (b"", "not_json", "send a JSON object"),
        (b'{"prompt": "1"', "malformed_json", "isn't whole JSON: Expecting"),
        (b"\xff\xfe", "malformed_json", "JSON"),
        (b'{"prompt": "\xe9"}', "malformed_json", "isn't UTF-8"),
        (b"[" * 30_000, "malformed_json", "nested too deeply"),
        (b'{"seed": %s}' % (b"9" * 5000), "malformed_json", "too many digits"),
        (b"[]", "invalid_value", "valid dictionary"),
        (b'{"guidance_scale": NaN}', "invalid_value", "finite"),
    ],
)
def test_a_body_that_is_no_request_is_refused(
    served: Served, body: bytes, code: str, words: str, content_type: str
) -> None:
    answer = served.ask("POST", GENERATIONS, content=body, headers={"Content-Type": content_type})
    error = error_of(answer)
    assert (answer.status_code, error["code"]) == (400, code) and words in error["message"]


def test_the_refusal_of_an_encoded_body_names_the_encoding(served: Served) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    answer = served.ask("POST", GENERATIONS, content=gzip.compress(b'{"prompt": "7"}'), headers=headers)
    error = error_of(answer)
    assert (answer.status_code, error["code"]) == (400, "malformed_json") and "Content-Encoding gzip" in error[
        "message"
    ]


def test_a_body_of_another_type_is_refused(served: Served) -> None:
    answer = served.ask("POST", GENERATIONS, content=b'{"prompt": "7"}', headers={"Content-Type": "text/plain"})
    assert (answer.status_code, error_of(answer)["code"]) == (400, "not_json")


def test_a_drawn_seed_is_told_and_paints_the_same_again(served: Served) -> None:
    first = served.generate(prompt="3", n=3, size="16x16").json()["data"]
    again = served.generate(prompt="3", n=3, size="16x16", seed=first[0]["seed"]).json()["data"]
    assert first == again and len({item["b64_json"] for item in first}) == 3
    assert pixels(first[0]["b64_json"]).shape == (16, 16)


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.headers["content-type"].startswith("text/event-stream")
    parts = [part.split("\n") for part in answer.text.strip().split("\n\n")]
    read = [(lines[0].removeprefix("event: "), json.loads(lines[1].removeprefix("data: "))) for lines in parts]
    assert all(kind == event.get("type", "error") for kind, event in read)
    return [event for _, event in read]


@pytest.mark.parametrize(("asked", "seen"), [(None, 0), (0, 0), (1, 1), (3, 3)])
def test_a_stream_shows_the_image_on_its_way(served: Served, asked: int | None, seen: int) -> None:
    *parts, end = events(served.generate(prompt="7", seed=5, stream=True, partial_images=asked, strategy="top-2"))
    right = served.generate(prompt="7", seed=5, strategy="top-2").json()
    assert [part["partial_image_index"] for part in parts] == list(range(seen))
    assert {part["type"] for part in parts} <= {"image_generation.partial_image"}
    assert end["type"] == "image_generation.completed" and end["usage"]["total_tokens"] == 0
    assert end["b64_json"] == right["data"][0]["b64_json"] and end["experts"] == right["experts"][0]
    distances = [np.abs(pixels(part["b64_json"]) - pixels(end["b64_json"])).mean() for part in parts]
    assert distances == sorted(distances, reverse=True) and len(set(distances)) == seen


def test_a_stream_tells_the_routing_so_far(served: Served, tiny_run: Run) -> None:
    asked = {"prompt": "7", "seed": 5, "strategy": "full", "steps": 30, "routing": True}
    *parts, end = events(served.generate(**asked, stream=True, partial_images=50))
    right_SK = DDMPipeline.from_run(tiny_run)(["7"], seeds=5, strategy="full", num_inference_steps=30).routing_SBK[:, 0]
    assert [len(part["routing"]) for part in parts] == list(range(1, 30))
    for event in (*parts, end):
        np.testing.assert_allclose(event["routing"], right_SK[: len(event["routing"])], atol=1e-4)
    plain = served.generate(**asked, n=2).json()
    assert plain["routing"][0] == end["routing"] and np.shape(plain["routing"]) == (2, 30, 2)
    assert plain["data"][0]["b64_json"] == end["b64_json"]
    without = served.generate(**asked | {"routing": None}).json()
    assert plain["routing_experts"] == end["routing_experts"] == ["expert-000", "expert-001"]
    assert {"routing", "routing_experts"}.isdisjoint(without) and without["data"][0] == plain["data"][0]


def test_a_stream_is_refused_before_its_first_event(served: Served) -> None:
    answer = served.generate(prompt="7", stream=True, steps=1000, strategy="full", timeout=1e-3)
    assert answer.status_code == 408 and error_of(answer)["code"] == "deadline_exceeded"


def test_time_that_is_over_is_said(served: Served) -> None:
    answer = served.generate(prompt="7", steps=1000, strategy="full", timeout=0.01)
    assert answer.status_code == 408 and answer.headers["retry-after"]
    assert error_of(answer)["code"] == "deadline_exceeded"


def test_models_can_be_listed_and_looked_up(served: Served) -> None:
    (entry,) = served.ask("GET", "/v1/models").json()["data"]
    assert served.ask("GET", f"/v1/models/{entry['id']}").json() == entry
    assert entry["classes"] == list("0123456789") and entry["size"] == "8x8"
    assert entry["experts"] == ["expert-000", "expert-001"] and entry["defaults"]["steps"] == 10
    missing = served.ask("GET", "/v1/models/dall-e-3")
    assert missing.status_code == 404 and error_of(missing)["code"] == "model_not_found"


def test_a_probe_is_told_nothing_of_the_classes(served: Served) -> None:
    health = served.ask("GET", "/healthz").json()
    assert health.keys() == {"status", "model", "experts", "weights"}
    assert health["experts"] == ["expert-000", "expert-001"] == list(health["weights"])[:2]


def test_readiness_names_what_is_away(served: Served) -> None:
    assert served.ask("GET", "/readyz").json() == {"status": "ok", "away": []}
    served.away.append("expert-001")
    answer = served.ask("GET", "/readyz")
    served.away.clear()
    assert (answer.status_code, answer.json()["away"]) == (503, ["expert-001"])


def test_metrics_count_what_happened(served: Served) -> None:
    def value(line: str) -> float:
        text = served.ask("GET", "/metrics").text
        return sum(float(each.rpartition(" ")[2]) for each in text.splitlines() if each.startswith(line))

    images, velocities = 'ddm_images_total{strategy="once"}', "ddm_velocities "
    before = value(images), value(velocities), value("ddm_steps_total")
    served.generate(prompt="7", n=2, strategy="once", steps=4)
    assert (value(images) - before[0], value(velocities) - before[1]) == (2, 4)
    assert value("ddm_steps_total") - before[2] == 8


def test_names_of_strategies_do_not_fill_the_memory(served: Served) -> None:
    for margin in range(5):
        assert served.generate(prompt="1", steps=1, strategy=f"sticky-0.1{margin}").status_code == 200
    lines = served.ask("GET", "/metrics").text.splitlines()
    assert len([line for line in lines if line.startswith("ddm_images_total{") and "sticky" in line]) == 1


def test_documentation_needs_no_other_host(served: Served) -> None:
    assert served.ask("GET", "/docs").status_code == 404
    schema = served.ask("GET", "/openapi.json").json()
    answers = schema["paths"][GENERATIONS]["post"]["responses"]
    assert {"200", "400", "401", "404", "408", "413", "429", "500", "503"} <= answers.keys()
    assert "422" not in answers


def test_others_are_answered_while_large_images_are_encoded(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    encoding, others_are_done, encode = threading.Event(), threading.Event(), routes.images_response

    def slow(*args: Any) -> dict[str, Any]:
        encoding.set()
        assert others_are_done.wait(60), "nobody else was answered meanwhile"
        return encode(*args)

    async def asked() -> int:
        async with client(Guard(served.app)) as session:
            body = {"prompt": "1", "steps": 1, "size": "1024x1024"}
            large = asyncio.ensure_future(session.post(GENERATIONS, json=body))
            while not encoding.is_set():
                await asyncio.sleep(0.01)
            assert (await session.get("/healthz")).status_code == 200
            others_are_done.set()
            return (await large).status_code

    monkeypatch.setattr(routes, "images_response", slow)
    assert asyncio.run(asked()) == 200


def test_an_error_of_an_engine_is_one_of_the_server(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr(served.engine, "submit", broken)
    answer = served.generate(prompt="1")
    assert answer.status_code == 500 and "secret" not in answer.text
    assert error_of(answer)["code"] == "internal_error"


def test_an_answer_says_nothing_of_where_things_are(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of a replica comes as an exception of Ray's, whose text is a traceback."""

    def raised(error: Exception, code: str) -> str:
        def broken(*_: Any, **__: Any) -> None:
            raise error

        monkeypatch.setattr(served.engine, "submit", broken)
        answer = served.generate(prompt="1")
        assert answer.status_code == 500 and error_of(answer)["code"] == code
        message: str = error_of(answer)["message"]
        assert not re.search("Traceback|/srv|pid=|10[.]0|\n", message)
        return message

    remote = RayTaskError("velocity", "Traceback: /srv/run.py\n (pid=7, ip=10.0.0.7)", NotFiniteError("expert 1: NaN"))
    assert raised(remote.as_instanceof_cause(), "sampling_failed") == "expert 1: NaN"
    for error in (CorruptArtifact("/srv/run/experts/001: gone"), StorageError("s3://x at 10.0.0.7: denied")):
        assert raised(error, "internal_error").endswith(type(error).__name__)
