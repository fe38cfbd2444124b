"""Wires a finished run into a Serve application: the only place that names and sizes deployments."""

import errno
import signal
import socket
import threading
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve import Application
from ray.serve.config import HTTPOptions
from ray.serve.schema import LoggingConfig

from ddm_ray.errors import Give, RunError, ServeError, one_line
from ddm_ray.ray_session import ray_session
from ddm_ray.serve.api import API
from ddm_ray.serve.deployments import ExpertReplica, RouterReplica
from ddm_ray.storage.graph import PARTITION, ROUTER
from ddm_ray.storage.run import Run
from ddm_ray.storage.store import is_local

# Each part takes a small share of a core, so that all find room on a laptop; a config file gives more.
# Serve's default of 5 ongoing requests would keep a replica's threads idle and hide demand from autoscaling.
# Weights that can't be loaded stay so: Serve's default of 20 tries would be minutes of silence.
PART: dict[str, Any] = {"max_ongoing_requests": 16, "max_constructor_retry_count": 2}
INGRESS: dict[str, Any] = {
    "max_ongoing_requests": 64,
    "max_queued_requests": 256,
    "max_constructor_retry_count": 2,
}
NUM_CPUS = 0.1

REQUEST_TIMEOUT_S = 300.0


class ServeArgs(BaseModel):
    """Arguments of `build_app`, as a config file gives them; `device` is torch's, for experts and router."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: str = Field(description="absolute path or URI of a finished run, as the serving machines see it")
    device: str = "cpu"


def build_app(args: ServeArgs) -> Application:
    """`expert-000` ... , `router` and the ingress `api`, one replica each unless a config file says more.

    On a cuda device the parts share one GPU unless `ray_actor_options` there say otherwise.
    Raises ServeError for an unfinished run, RunError where there is none.
    """
    run = _finished(args.run)
    num_experts = run.config.partition.num_clusters
    # Rounded down, so that the shares of all experts and the router never need more than one GPU.
    num_gpus = int(1000 / (num_experts + 1)) / 1000 if args.device.startswith("cuda") else 0
    share = {"num_cpus": NUM_CPUS, "num_gpus": num_gpus}
    experts = [
        serve.deployment(name=f"expert-{cluster:03d}", ray_actor_options=share, **PART)(ExpertReplica).bind(
            run.url, cluster, args.device
        )
        for cluster in range(num_experts)
    ]
    router = serve.deployment(name="router", ray_actor_options=share, **PART)(RouterReplica).bind(run.url, args.device)
    ingress = serve.deployment(name="api", ray_actor_options={"num_cpus": NUM_CPUS}, **INGRESS)(API)
    return ingress.bind(run.url, experts, router)


def _finished(url: str) -> Run:
    try:
        run = Run.open(url)
    except RunError as error:
        if is_local(url) and not url.startswith("/"):
            raise RunError(f"{error} (the path is relative; give {url!r} as an absolute path)") from None
        raise
    if run.config.data.num_classes is None:
        raise ServeError(f"{run.url} is conditioned on texts: only class-conditional runs can be served so far")
    if run.config.data.latents is not None:
        raise ServeError(f"{run.url} is a run of latents, which nothing decodes here so far; sample from it in Python")
    missing = [name for name in (PARTITION, *run.experts, ROUTER) if run.finished(name) is None]
    if missing:
        raise ServeError(f"{run.url} isn't finished, it has no {', '.join(missing)} yet", run.make(missing[0]))
    return run


def require_servable(run_url: str, port: int, host: str = "127.0.0.1") -> None:
    """Raises ServeError if the port is in use or the run unfinished, RunError if it isn't one; needs no Ray.

    Reads every byte of the weights: a replica that finds them altered would be started again and again.
    Raises CorruptArtifact.
    """
    run = _finished(run_url)
    for artifact in (*run.experts, ROUTER):
        manifest = run.require(artifact)
        for name in manifest.files:
            run.read(artifact, name, manifest)
    _require_free(host, port)


def serve_run(run_url: str, port: int, host: str = "127.0.0.1", address: str | None = None) -> None:
    """Serve a finished run over HTTP until SIGINT or SIGTERM; call it on the main thread.

    On the Ray that `ray_session` finds for `address`. Raises as `require_servable`, and ServeError if Serve is
    running there already, before anything starts.
    """
    require_servable(run_url, port, host)
    with ray_session(address):
        if serve.status().proxies:
            raise ServeError(
                "Serve already runs in this Ray cluster; add the run with serve deploy (see serving/mixture.yaml)"
            )
        _serve_until_told(run_url, port, host)


def _serve_until_told(run_url: str, port: int, host: str) -> None:
    stop = threading.Event()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, lambda *_: stop.set())
    quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)
    try:
        serve.start(
            proxy_location="HeadOnly",
            http_options=HTTPOptions(host=host, port=port, request_timeout_s=REQUEST_TIMEOUT_S),
            logging_config=quiet,
        )
        serve.run(build_app(ServeArgs(run=run_url)), name="ddm", route_prefix="/", logging_config=quiet)
        print(_greeting(run_url, host, port), flush=True)
        stop.wait()
    finally:
        serve.shutdown()
        for number, handler in before.items():
            signal.signal(number, handler)


def _greeting(run_url: str, host: str, port: int) -> str:
    name = Run.open(run_url).config.data.class_names[-1]
    url = f"http://{host}:{port}"
    body = f'{{"prompt": "{name}", "size": "256x256", "response_format": "png"}}'
    return (
        f"Serving {run_url} at {url} (routes: {url}/docs); stop with Ctrl-C. Try:\n"
        f"  curl {url}/v1/images/generations -H 'Content-Type: application/json' -d '{body}' -o {name}.png"
    )


def _require_free(host: str, port: int) -> None:
    """Raises ServeError if nothing could listen there. Without this Serve waits long and says little."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except (OSError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise ServeError(f"port {port} on {host} is in use", Give("port", "choose another")) from None
        fix = Give("host", "choose another port, or another host")
        raise ServeError(f"can't listen on {host} port {port}: {one_line(error)}", fix) from None
