"""The served mixture, each expert in a process of its own, while processes die: no request is lost, nor an expert."""

import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from ddm_ray.config import SamplingSettings
from ddm_ray.run.run import Run
from ddm_ray.sampling import driver
from ddm_ray.sampling.request import SampleRequest
from ddm_ray.sampling.run_models import load_models
from ddm_ray.serve.cluster.args import ServeArgs
from ddm_ray.serve.http.responses import image_file
from tests.serve.cluster.test_http import TOLERANCE, distance, wait_until
from tests.serve.conftest import Answer, Server, command_line, descendants, pixels, served

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def server(tiny_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`ddm serve --placement per-expert --replicas 2` of the tiny run."""
    args = ServeArgs(run=tiny_run.url, placement="per-expert", replicas=2)
    with served(args, tmp_path_factory.mktemp("server")) as server:
        wait_until(lambda: len(server.replicas("api")) == 2)
        yield server


def pid_of(server: Server, title: str) -> int:
    """The only process of this server whose title has these words."""
    (pid,) = (pid for pid in descendants(server.process.pid) if title in command_line(pid))
    return pid


def kill_controller(server: Server) -> None:
    """SIGKILL Serve's controller; the next one answers that nothing is away."""
    before = pid_of(server, "ServeController")
    os.kill(before, signal.SIGKILL)
    wait_until(
        lambda: any("ServeController" in command_line(pid) for pid in descendants(server.process.pid) if pid != before)
    )
    while (answer := server.ask("GET", "/readyz")).status == 500:
        pass  # it has begun, and knows of no application yet
    assert answer.json == {"status": "ok", "away": []}


@pytest.mark.chaos
def test_an_expert_that_a_new_controller_has_not_looked_at_is_alive(server: Server) -> None:
    """It doesn't answer the controller here, which so has it in the state RECOVERING until it goes on."""
    answers = list[Answer]()
    asking = [
        threading.Thread(target=lambda own=strategy: answers.append(server.generate(prompt="1", strategy=own)))
        for strategy in ("once", "top-1", "full")
    ]
    frozen = server.replicas("expert-")
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    try:
        for thread in asking:
            thread.start()
        kill_controller(server)
    finally:
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)
        for thread in asking:
            thread.join()
    assert [answer.status for answer in answers] == [200] * 3
    assert not [answer.json["degraded"] for answer in answers if "degraded" in answer.json]
    assert server.replicas("expert-") == frozen


@pytest.mark.chaos
def test_killed_processes_cost_no_request(server: Server, tiny_run: Run) -> None:
    """SIGKILL controller, experts, ingress and proxy under load: all is answered, and with the image that it says."""
    expected = {
        (strategy, away): image_without(tiny_run, strategy, away)
        for strategy in ("once", "full", "top-1")
        for away in ("", "expert-000", "expert-001")
    }
    stop, wrong, answered = threading.Event(), [], list[tuple[str, str]]()

    def keep_asking(strategy: str) -> None:
        while not stop.is_set():
            body = {"strategy": strategy, "steps": 25, "solver": "heun", "response_format": "png", "timeout": 60}
            answer = server.generate(prompt="1", seed=2, **body)
            key = strategy, answer.headers.get("x-degraded", "")
            if answer.status != 200 or distance(pixels(answer.body), expected[key]) > TOLERANCE:
                wrong.append((key, answer.status, answer.body[:300]))
            answered.append(key)

    threads = [threading.Thread(target=keep_asking, args=[strategy]) for strategy in ("once", "full", "top-1") * 2]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: len(answered) > 2 * len(threads))
        kill_controller(server)
        since = len(answered)
        wait_until(lambda: len(answered) > since + 2 * len(threads))
        assert not [away for _, away in answered if away]
        for part in ("expert-000", "expert-001"):
            since, linked = len(answered), linked_calls(server)
            wait_until(lambda: len(answered) > since + 2 * len(threads))  # noqa: B023
            wait_until(lambda: linked_calls(server) > linked)  # noqa: B023
            (before,) = server.replicas(part)
            os.kill(before, signal.SIGKILL)
            wait_until(lambda: bool(set(server.replicas(part)) - {before}))  # noqa: B023
            wait_until(lambda: server.ask("GET", "/readyz").status == 200)
        for count in (1, 2):
            before = server.replicas("api")
            for pid in before[:count]:
                os.kill(pid, signal.SIGKILL)
            wait_until(lambda: len(set(server.replicas("api")) - set(before[:count])) == 2)  # noqa: B023
            since = len(answered)
            wait_until(lambda: len(answered) > since + 2 * len(threads))  # noqa: B023
        os.kill(pid_of(server, "ProxyActor"), signal.SIGKILL)
        wait_until(lambda: server.ask("GET", "/readyz").status == 200)
        since = len(answered)
        wait_until(lambda: len(answered) > since + 2 * len(threads))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong, wrong[:3]


@pytest.mark.chaos
def test_weights_that_are_gone_are_left_out_until_they_are_back(server: Server, tiny_run: Run) -> None:
    """By one replica, which isn't started again and again meanwhile."""

    def degraded() -> bool:
        answer = server.generate(prompt="1", strategy="full", steps=2)
        assert answer.status == 200, answer.body
        return answer.json.get("degraded") == ["expert-001"]

    (weights,) = Path(tiny_run.url).glob("experts/001/attempts/*/weights/*/ema.safetensors")
    away = weights.rename(weights.with_suffix(".away"))
    try:
        (before,) = server.replicas("expert-001")
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: bool(set(server.replicas("expert-001")) - {before}))
        (replica,) = set(server.replicas("expert-001")) - {before}
        wait_until(lambda: "no weights are loaded yet" in logs_of(replica))
        # Each ingress learns it by a request of its own.
        away_one = {"status": "degraded", "away": ["expert-001"]}
        wait_until(lambda: degraded() and [server.ask("GET", "/readyz").json for _ in range(4)] == [away_one] * 4)
        assert server.replicas("expert-001") == [replica]
    finally:
        away.rename(weights)
    wait_until(lambda: not degraded() and [server.ask("GET", "/readyz").status for _ in range(4)] == [200] * 4)
    assert server.replicas("expert-001") == [replica]


@pytest.mark.chaos
def test_who_comes_while_it_stops_is_refused_at_once_and_what_is_in_flight_is_answered(server: Server) -> None:
    """The last test of this server."""
    answers = list[Answer]()
    body = {"prompt": "1", "n": 10, "steps": 1000, "strategy": "once"}
    asking = threading.Thread(target=lambda: answers.append(server.generate(**body)))
    before = server.cpu_seconds()
    asking.start()
    wait_until(lambda: server.cpu_seconds() > before + 0.1)
    server.process.send_signal(signal.SIGINT)
    wait_until(lambda: server.ask("GET", "/healthz").status == 503)
    asking.join()
    assert [answer.status for answer in answers] == [200]


def logs_of(pid: int) -> str:
    """What is in the log files that a process has open."""
    opened = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    return "".join(Path(path).read_text(errors="replace") for path in opened if path.endswith(".log"))


def linked_calls(server: Server) -> float:
    """Number of velocities that crossed without Serve, by whichever ingress answers."""
    counter = r'^ddm_calls_total\{way="link"\} (.+)$'
    match = re.search(counter, server.ask("GET", "/metrics").body.decode(), re.M)
    return float(match[1]) if match else 0.0


def image_without(run: Run, strategy: str, away: str) -> np.ndarray:
    """The image of the requests above, by the experts that aren't away."""
    models = load_models(run)
    experts = [None if f"expert-{k:03d}" == away else models.experts[k] for k in range(models.info.num_experts)]
    settings = SamplingSettings(strategy=strategy, steps=25, solver="heun")
    result = driver.sample(SampleRequest((2,), torch.tensor([1]), settings), models.info, experts, models.router)
    return pixels(image_file(result.images_BCHW[0], 1))
