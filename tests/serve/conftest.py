"""Servers of their own for the tests: a driver process with its private Ray cluster, spoken to over HTTP."""

import base64
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ddm_ray.jobs.attempts import claim
from ddm_ray.jobs.published import Weights
from ddm_ray.models import weights
from ddm_ray.run.graph import Artifact, expert
from ddm_ray.run.run import Run
from ddm_ray.sampling.run_models import load_trained
from ddm_ray.serve.cluster.args import ServeArgs
from ddm_ray.serve.cluster.expert_replica import ExpertReplica
from ddm_ray.serve.engine.computing import Computing
from tests.conftest import fresh_token, heed_ctrl_c
from tests.published import publish_weights
from tests.random_run import make_run

ROOT = Path(__file__).parents[2]
START_S = 180.0

SERVE_RUN = """
import sys, ray
from ddm_ray.environment import prepare_serve
from ddm_ray.serve.cluster.haproxy import find_haproxy
prepare_serve(direct_ingress=find_haproxy() is not None)
from ddm_ray.serve.cluster.server import serve_run
from ddm_ray.serve.cluster.args import ServeArgs
from ddm_ray.cli.fixes import phrase
args, port, temp = sys.argv[1:]
ray.init(address="local", num_cpus=4, include_dashboard=False, _temp_dir=f"{temp}/ray", log_to_driver=False)
serve_run(
    ServeArgs.model_validate_json(args), int(port), phrase=phrase,
    on_progress=lambda share, note: print(f"start {share:.2f} {note}"),
)
"""


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Server:
    """A serving driver process and where it listens."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    def ask(self, method: str, path: str, body: bytes | dict[str, Any] | None = None) -> Answer:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=120)
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        connection.request(method, path, data, {"Content-Type": "application/json"} if data else {})
        response = connection.getresponse()
        answer = Answer(response.status, dict(response.headers), response.read())
        connection.close()
        return answer

    def generate(self, **body: Any) -> Answer:
        return self.ask("POST", "/v1/images/generations", body)

    def replicas(self, deployment: str) -> list[int]:
        """Process ids of this server's own replicas of a deployment."""
        return [pid for pid in descendants(self.process.pid) if f":{deployment}" in command_line(pid)]

    def cpu_seconds(self) -> float:
        """Time of processors that all replicas that run have spent."""
        fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in self.replicas("ddm:")]
        return sum(int(each[11]) + int(each[12]) for each in fields) / os.sysconf("SC_CLK_TCK")


def pixels(picture: bytes | str) -> np.ndarray:
    """Grey levels or colours of a PNG, which may be in base64."""
    data = base64.b64decode(picture) if isinstance(picture, str) else picture
    return np.asarray(Image.open(io.BytesIO(data))).astype(int)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def descendants(root: int) -> list[int]:
    """Process ids of all children of `root`, and of theirs."""
    children: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        children.setdefault(int(fields[1]), []).append(int(status.parent.name))
    pids = [root]
    for pid in pids:
        pids.extend(children.get(pid, []))
    return pids[1:]


@contextmanager
def serving(command: list[str], port: int, folder: Path) -> Iterator[Server]:
    """Runs the command until its /healthz answers; then SIGINT must end it in good order."""
    log = folder / "server.log"
    # Each server has ports of its own.
    ours = {name: value for name, value in os.environ.items() if not name.startswith("RAY_SERVE_DIRECT_INGRESS_")}
    env = {**ours, **fresh_token(), "PYTHONPATH": f"{ROOT}:{os.environ['PYTHONPATH']}"}
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, stdout=sink, stderr=sink, env=env, cwd=ROOT, start_new_session=True, preexec_fn=heed_ctrl_c
        )
    server = Server(process, port, log)
    try:
        deadline = time.monotonic() + START_S
        while True:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
            try:
                if server.ask("GET", "/healthz").status == 200:
                    break
            except OSError:
                pass
            time.sleep(0.2)
        yield server
    finally:
        started = descendants(process.pid)
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pid in started:
            if "ray" in command_line(pid):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
    assert process.returncode == 0, log.read_text()[-4000:]


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(str(tmp_path_factory.mktemp("serve") / "tiny"))


@pytest.fixture(scope="module")
def server(tiny_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`serve_run` of the tiny run, as `ddm serve` calls it; test_http_faults.py has another placement."""
    with served(ServeArgs(run=tiny_run.url), tmp_path_factory.mktemp("server")) as server:
        yield server


@contextmanager
def served(args: ServeArgs, folder: Path) -> Iterator[Server]:
    """`serve_run` in a process of its own."""
    port = free_port()
    with TemporaryDirectory(prefix="ddm", dir="/tmp", ignore_cleanup_errors=True) as temp:
        command = [sys.executable, "-c", SERVE_RUN, args.model_dump_json(), str(port), temp]
        with serving(command, port, folder) as server:
            yield server


async def replica_of(run: Run, cluster: int, *others: Any, **computing: Any) -> ExpertReplica:
    """An expert's replica in this process, as Serve makes it."""
    replica = ExpertReplica.__new__(ExpertReplica)
    settings = Computing(**{"max_rows": 8} | computing)
    await replica.__init__(run.url, cluster, settings, *others)  # type: ignore[misc]
    return replica


def unfinished(finished: Run, folder: Path) -> Run:
    """A copy of a run whose expert 1 still trains, and has published nothing yet."""
    shutil.copytree(finished.url, folder)
    run = Run.open(str(folder))
    run.store.delete(expert(1))
    return run


def milestone(run: Run, artifact: Artifact, step: int, scale: float = 1.0) -> Weights:
    """Publish weights as an attempt does on its way: those of expert 0 times `scale`."""
    model = load_trained(run, expert(0))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    tensors, spec = weights.weights_as_bytes(model, weights.spec_of_model(model))
    parts = {"ema.safetensors": tensors, "model.json": spec.encode()}
    prefix, _ = publish_weights(claim(run.store, artifact), step, run.identity(artifact), parts)
    return Weights(artifact, prefix, step, final=False, run=run.url)
