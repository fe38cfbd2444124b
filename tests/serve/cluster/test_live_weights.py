"""New weights go live on a real Ray Serve, and back, while images are asked for: none is lost, none is mixed."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from ddm_ray.config import SamplingSettings
from ddm_ray.pipeline import DDMPipeline
from ddm_ray.run.graph import expert
from ddm_ray.run.run import Run
from ddm_ray.sampling import driver
from ddm_ray.sampling.request import SampleRequest
from ddm_ray.sampling.run_models import mixture_info
from ddm_ray.serve.cluster.args import ServeArgs
from ddm_ray.serve.engine.computing import Computing, Networks
from ddm_ray.serve.engine.versions import Versions
from ddm_ray.serve.http.responses import image_file
from tests.serve.conftest import Answer, Server, milestone, pixels, served, unfinished

pytestmark = pytest.mark.chaos

STRATEGIES = ("once", "full", "top-1")


def images(run: Run) -> dict[str, np.ndarray]:
    """Images of the version that is the newest now, by strategy."""
    version, networks = Versions(run).newest(), Networks(run.config.data, mixture_info(run), Computing())
    experts = [None if weights is None else networks.of(weights, run) for weights in version.experts]
    router = None if version.router is None else networks.of(version.router, run)
    requests = {each: SampleRequest((2,), torch.tensor([1]), settings_of(each)) for each in STRATEGIES}
    results = {each: driver.sample(requests[each], mixture_info(run), experts, router) for each in STRATEGIES}
    return {each: pixels(image_file(result.images_BCHW[0], 1)) for each, result in results.items()}


def settings_of(strategy: str) -> SamplingSettings:
    return SamplingSettings(strategy=strategy, steps=25, solver="heun")


class Clients:
    """Asks for the same images again and again, and knows by which version each was made."""

    def __init__(self, server: Server, versions: dict[str, dict[str, np.ndarray]]):
        self._server, self._versions = server, versions
        self.made, self.wrong, self._stop = list[tuple[str, str, str]](), list[object](), threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=[each]) for each in STRATEGIES]

    def __enter__(self) -> "Clients":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, strategy: str) -> None:
        body = {"prompt": "1", "seed": 2, "strategy": strategy, "steps": 25, "solver": "heun", "response_format": "png"}
        while not self._stop.is_set():
            answer = self._server.generate(**body)
            image = pixels(answer.body) if answer.status == 200 else None
            near = [
                name
                for name, all_of in self._versions.items()
                if image is not None and is_near(image, all_of[strategy])
            ]
            degraded = answer.headers.get("x-degraded", "")
            if not near:
                self.wrong.append((strategy, answer.status, answer.body[:300]))
            self.made.extend((strategy, name, degraded) for name in near)

    def until(self, name: str, degraded: str = "") -> None:
        """Wait until every strategy's images are of this version."""
        since, deadline = len(self.made), time.monotonic() + 120
        while {(each, name, degraded) for each in STRATEGIES} - set(self.made[since:]):
            assert time.monotonic() < deadline, (name, self.made[since:][-9:], self.wrong[:3])
            time.sleep(0.02)


def is_near(left: np.ndarray, right: np.ndarray) -> bool:
    return int(np.abs(left - right).max()) <= 1


def is_monolith(answer: Answer, run: Run) -> bool:
    assert answer.status == 200, answer.body
    (image,) = DDMPipeline.from_run(run, model="monolith")(["1"], seeds=2).images
    return is_near(pixels(answer.json["data"][0]["b64_json"]), np.asarray(image).astype(int))


def test_weights_go_live_and_back_without_a_lost_or_mixed_image(tiny_run: Run, tmp_path: Path) -> None:
    run = unfinished(tiny_run, tmp_path / "run")
    versions, pin_file = {"without": images(run)}, tmp_path / "pins.yaml"
    args = ServeArgs(run=run.url, placement="per-expert", pin_file=str(pin_file), refresh_s=0.2, dense="monolith")
    with served(args, tmp_path) as server, Clients(server, versions) as clients:
        clients.until("without", "expert-001")
        for step, scale in ((10, 1.0), (20, 1.5)):
            # Made in a run of its own first, so that the clients know the images before anybody can see them.
            preview = unfinished(tiny_run, tmp_path / f"preview-{step}")
            milestone(preview, expert(1), step, scale)
            versions[str(step)] = images(preview)
            milestone(run, expert(1), step, scale)
            clients.until(str(step))
        pin_file.write_text("expert-001: 10\n")
        clients.until("10")
        pin_file.write_text("expert-001: 11\n")
        health = server.ask("GET", "/healthz").json
        assert health["weights"]["expert-001"] == {"step": 10, "final": False}
        pin_file.unlink()
        clients.until("20")
        assert server.ask("GET", "/readyz").status == 200
        assert is_monolith(server.generate(prompt="1", seed=2, model="tiny-monolith"), run)
        assert "expert-001 isn't trained yet" in server.log.read_text()
    assert not clients.wrong, clients.wrong[:3]
