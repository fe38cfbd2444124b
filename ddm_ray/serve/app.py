"""A finished run as a Serve application: the only place that names and sizes deployments."""

import errno
import ipaddress
import os
import signal
import socket
import threading
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

# Our code leaves a replica's event loop free, so neither it nor Serve's own needs another.
os.environ.setdefault("RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD", "0")
os.environ.setdefault("RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP", "0")

from ray import serve
from ray.serve import Application
from ray.serve.config import HTTPOptions
from ray.serve.schema import LoggingConfig

from ddm_ray.errors import Give, RunError, ServeError, one_line
from ddm_ray.ray_session import ray_session
from ddm_ray.serve.answers import expert_name
from ddm_ray.serve.api import API, DECODER, ENCODER
from ddm_ray.serve.codec import Decoder, Encoder
from ddm_ray.serve.deployments import ExpertReplica
from ddm_ray.serve.guard import TOKENS, Limits, read_tokens
from ddm_ray.storage.graph import PARTITION, ROUTER
from ddm_ray.storage.run import Run
from ddm_ray.storage.store import is_local

# Each part takes a small share of a core, so that all find room on a laptop; a config file gives more.
NUM_CPUS = 0.1
# Engines refuse what they can't do in time themselves; Serve's default of 5 ongoing requests would leave batches empty.
# Weights that can't be loaded stay so: its default of 20 tries would be minutes of silence. A replica that died is
# missed after a second, not after ten.
PART: dict[str, Any] = {
    "max_ongoing_requests": 1000,
    "max_constructor_retry_count": 2,
    "health_check_period_s": 1,
    "health_check_timeout_s": 30,
}

REQUEST_TIMEOUT_S = 330.0
"""Seconds after which Serve ends a request that its engine should have ended before."""


class ServeArgs(BaseModel):
    """Arguments of `build_app`, as a config file gives them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: str = Field(description="absolute path or URI of a finished run, as the serving machines see it")
    placement: Literal["colocated", "multiplexed", "per-expert"] = Field(
        default="colocated",
        description="colocated: each replica of `api` has all experts, and nothing crosses the network; multiplexed:"
        " likewise, but in host memory, and few of them on the device in turn, for many experts that are seldom asked;"
        " per-expert: a deployment for each expert, which scales by itself",
    )
    resident: int = Field(default=2, ge=2, description="multiplexed: experts on the device at a time")
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="multiplexed: precision of the experts' products; bfloat16 halves what a swap copies, and images"
        " are those of bf16 autocast",
    )
    device: str = Field(default="cpu", description="torch's device for experts and router")
    max_rows: PositiveInt = Field(default=32, description="images of a batch; more wait")
    token_file: str | None = Field(
        default=None,
        description="file with bearer tokens, one a line, where this is called; none: those in $DDM_SERVE_TOKENS there,"
        " and without any everybody is let in",
    )
    per_minute: float | None = Field(
        default=None, gt=0, description="requests for images a minute and token; none: any"
    )


def build_app(args: ServeArgs) -> Application:
    """The ingress `api`, and where placed so `expert-000` ..., one replica each unless a config file says more.

    On a cuda device the parts share one GPU unless `ray_actor_options` there say otherwise.
    Raises ServeError for an unfinished run, RunError where there is none, ConfigError for tokens that can't be read.
    """
    run = _finished(args.run)
    on_gpu, limits = args.device.startswith("cuda"), Limits(per_minute=args.per_minute)
    own = (run.url, args.device, args.max_rows, read_tokens(args.token_file), limits)
    if args.placement != "per-expert":
        few = {"resident": args.resident, "dtype": args.dtype} if args.placement == "multiplexed" else {}
        options = {"num_cpus": NUM_CPUS, "num_gpus": 1 if on_gpu else 0}
        return serve.deployment(name="api", ray_actor_options=options, **PART)(API).bind(*own, **few)
    data, num_experts = run.config.data, run.config.partition.num_clusters
    codecs = [each for each in ((ENCODER, Encoder, data.text), (DECODER, Decoder, data.latents)) if each[2]]
    # Rounded down, so that the shares of all parts never need more than one GPU.
    num_gpus = int(1000 / (num_experts + len(codecs))) / 1000 if on_gpu else 0
    share = {"num_cpus": NUM_CPUS, "num_gpus": num_gpus}
    experts = [
        serve.deployment(name=expert_name(cluster), ray_actor_options=share, **PART)(ExpertReplica).bind(
            run.url, cluster, args.device, args.max_rows
        )
        for cluster in range(num_experts)
    ]
    coded = {
        name: serve.deployment(name=name, ray_actor_options=share, **PART)(kind).bind(config, args.device)
        for name, kind, config in codecs
    }
    ingress = serve.deployment(name="api", ray_actor_options={"num_cpus": NUM_CPUS}, **PART)(API)
    return ingress.bind(*own, experts, coded)


def _finished(url: str) -> Run:
    try:
        run = Run.open(url)
    except RunError as error:
        if is_local(url) and not url.startswith("/"):
            raise RunError(f"{error} (the path is relative; give {url!r} as an absolute path)") from None
        raise
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


def serve_run(
    args: ServeArgs, port: int, host: str = "127.0.0.1", address: str | None = None, insecure: bool = False
) -> None:
    """Serve a finished run over HTTP until SIGINT or SIGTERM; call it on the main thread.

    On the Ray that `ray_session` finds for `address`. Raises as `require_servable`, ConfigError for tokens that can't
    be read, and ServeError if Serve is running there already, or if others could ask without a token and that isn't
    meant (`insecure`); before anything starts.
    """
    require_servable(args.run, port, host)
    if not read_tokens(args.token_file) and not insecure and not is_loopback(host):
        fix = Give("token_file", f"set ${TOKENS}, be insecure on purpose, or name who may ask")
        raise ServeError(f"whoever reaches {host} could ask for images without a token", fix)
    with ray_session(address):
        if serve.status().proxies:
            raise ServeError(
                "Serve already runs in this Ray cluster; add the run with serve deploy (see serving/mixture.yaml)"
            )
        _serve_until_stopped(args, port, host)


def is_loopback(host: str) -> bool:
    """True for an address that this machine alone reaches."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _serve_until_stopped(args: ServeArgs, port: int, host: str) -> None:
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
        serve.run(build_app(args), name="ddm", route_prefix="/", logging_config=quiet)
        print(_greeting(args, host, port), flush=True)
        stop.wait()
    finally:
        serve.shutdown()
        for number, handler in before.items():
            signal.signal(number, handler)


def _greeting(args: ServeArgs, host: str, port: int) -> str:
    data = Run.open(args.run).config.data
    prompt, side = (data.class_names or ("a red bird",))[-1], data.pixel_shape[-1]
    side *= max(1, 256 // side)
    url = f"http://{host}:{port}"
    token = " -H 'Authorization: Bearer TOKEN'" if read_tokens(args.token_file) else ""
    body = f'{{"prompt": "{prompt}", "size": "{side}x{side}", "response_format": "png"}}'
    return (
        f"Serving {args.run} at {url} (routes: {url}/openapi.json); stop with Ctrl-C. Try:\n"
        f"  curl {url}/v1/images/generations{token} -H 'Content-Type: application/json' -d '{body}' -o image.png"
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
