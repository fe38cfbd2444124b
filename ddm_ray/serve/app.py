"""A finished run as a Serve application: the only place that names and sizes deployments."""

import logging
import os
import random
from contextlib import ExitStack
from itertools import chain
from typing import Any

from ddm_ray.serve.gateway import Gateway, find_haproxy, until_told

# A client waits for what a replica does; Ray's own 15 is for work that gives way to all else on the machine.
os.environ.setdefault("RAY_worker_niceness", "0")
# Replicas of the ingress listen themselves, for a gateway that leads to them: a proxy and its way to a replica cost
# more than a small image. One that leaves stays until the gateway knows; Serve's own 30 s are for clouds' balancers.
if find_haproxy() is not None:
    os.environ.setdefault("RAY_SERVE_ENABLE_DIRECT_INGRESS", "1")
    os.environ.setdefault("RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S", "2")

from ray import serve
from ray.serve import Application
from ray.serve.config import HTTPOptions
from ray.serve.schema import LoggingConfig

from ddm_ray.errors import RunError, ServeError
from ddm_ray.ray_session import gpus, on_head, ray_session
from ddm_ray.remedies import Give
from ddm_ray.run.graph import PARTITION
from ddm_ray.run.run import Run
from ddm_ray.sampling.devices import AUTO
from ddm_ray.sampling.run_models import row_networks
from ddm_ray.serve.addresses import is_loopback, listening
from ddm_ray.serve.answers import expert_name
from ddm_ray.serve.api import API, DECODER, ENCODER
from ddm_ray.serve.args import ServeArgs
from ddm_ray.serve.codec import Decoder, Encoder
from ddm_ray.serve.computing import Computing
from ddm_ray.serve.deployments import ExpertReplica
from ddm_ray.serve.direct import local_replicas
from ddm_ray.serve.guard import TOKENS, Limits, read_tokens
from ddm_ray.serve.meters import DENSE
from ddm_ray.serve.versions import Version, Versions
from ddm_ray.spelling import one_line
from ddm_ray.store.store import is_local

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


def build_app(args: ServeArgs) -> Application:
    """The ingress `api`, and where placed so `expert-000` ..., one replica each unless a config file says more.

    On a cuda device the parts share one GPU unless `ray_actor_options` there say otherwise.
    Raises ServeError for a run without weights, RunError where there is none, ConfigError for tokens or pins that can't
    be read.
    """
    run, args = _servable(args)[0], _on_its_device(args)
    on_gpu, limits = args.device.startswith("cuda"), Limits(per_minute=args.per_minute, local=args.local)
    resident = args.resident if args.placement == "multiplexed" else None
    shared = (Computing(args.device, args.max_rows, args.precision, args.compile, resident), args.pin_file)
    own = (run.url, *shared, args.refresh_s, read_tokens(args.token_file), limits)
    data, num_experts = run.config.data, run.config.partition.num_clusters
    known = row_networks(run)
    encoder = (ENCODER, Encoder, data.text, known.get("text encoder"))
    decoder = (DECODER, Decoder, data.latents, known.get("autoencoder"))
    codecs = [each for each in (encoder, decoder) if each[2]]
    apart = args.placement == "per-expert"
    # Rounded down, so that the shares of all parts never need more than one GPU.
    num_parts = (num_experts + len(codecs) if apart else args.replicas) + (args.dense is not None)
    share = {"num_cpus": NUM_CPUS, "num_gpus": int(1000 / num_parts) / 1000 if on_gpu else 0}

    def replica(name: str, network: int | str) -> Application:
        part = serve.deployment(name=name, ray_actor_options=share, **PART)(ExpertReplica)
        return part.bind(run.url, network, *shared)

    others = {DENSE: replica(DENSE, args.dense)} if args.dense else {}
    if not apart:
        ingress = serve.deployment(name="api", num_replicas=args.replicas, ray_actor_options=share, **PART)(API)
        return ingress.bind(*own, (), others, args.dense)
    experts = [replica(expert_name(cluster), cluster) for cluster in range(num_experts)]
    for name, kind, config, fingerprint in codecs:
        part = serve.deployment(name=name, ray_actor_options=share, **PART)(kind)
        others[name] = part.bind(config, args.device, fingerprint)
    own_share = {"num_cpus": NUM_CPUS}
    ingress = serve.deployment(name="api", num_replicas=args.replicas, ray_actor_options=own_share, **PART)(API)
    return ingress.bind(*own, experts, others, args.dense)


def _on_its_device(args: ServeArgs) -> ServeArgs:
    """The arguments with the device that "auto" is on the connected Ray."""
    return args.model_copy(update={"device": "cuda" if gpus() else "cpu"}) if args.device == AUTO else args


def _servable(args: ServeArgs) -> tuple[Run, list[Version]]:
    url = args.run
    try:
        run = Run.open(url)
    except RunError as error:
        if is_local(url) and not url.startswith("/"):
            raise RunError(f"{error} (the path is relative; give {url!r} as an absolute path)") from None
        raise
    if run.finished(PARTITION) is None:
        raise ServeError(f"{run.url} has no partition yet", run.make(PARTITION))
    served = (None, args.dense) if args.dense else (None,)
    return run, [Versions(run, args.pin_file, dense).newest() for dense in served]


def require_servable(args: ServeArgs, port: int, host: str = "127.0.0.1") -> Version:
    """Return the mixture's weights that would be served now; needs no Ray.

    Raises ServeError if the port is in use or if no expert has weights yet, RunError if it isn't a run, ConfigError for
    pins that can't be met. Reads every byte of finished weights: a replica that finds them altered would be started
    again and again. Raises CorruptArtifact.
    """
    run, versions = _servable(args)
    for weights in chain(*versions):
        if weights.final:
            manifest = run.require(weights.artifact)
            for name in manifest.files:
                run.read(weights.artifact, name, manifest)
    listening(host, port).close()  # without this Serve waits long and says little
    return versions[0]


def serve_run(
    args: ServeArgs, port: int, host: str = "127.0.0.1", address: str | None = None, insecure: bool = False
) -> None:
    """Serve a run over HTTP until SIGINT or SIGTERM; call it on the main thread.

    On the Ray that `ray_session` finds for `address`. Raises as `require_servable`, ConfigError for tokens that can't
    be read, and ServeError if Serve is running there already, or if others could ask without a token and that isn't
    meant (`insecure`); before anything starts.
    """
    version = require_servable(args, port, host)
    if not read_tokens(args.token_file):
        if is_loopback(host) and not insecure:
            args = args.model_copy(update={"local": True})
        elif not insecure:
            fix = Give("token_file", f"set ${TOKENS}, be insecure on purpose, or name who may ask")
            raise ServeError(f"whoever reaches {host} could ask for images without a token", fix)
    with ray_session(address):
        if serve.status().proxies:
            raise ServeError(
                "Serve already runs in this Ray cluster; add the run with serve deploy (see serving/mixture.yaml)"
            )
        args = _on_its_device(args)
        if args.device == "cpu" and gpus():
            print(f"warning: {gpus():g} GPUs of this Ray stand idle; device cuda computes there", flush=True)
        gateway = find_haproxy() if on_head() else None  # where Serve's proxy is
        _serve_until_stopped(args, port, host, _greeting(args, version, host, port), gateway)


def _serve_until_stopped(args: ServeArgs, port: int, host: str, greeting: str, gateway: str | None) -> None:
    """Serve and wait; `gateway`: the program HAProxy, which listens for Serve's proxy then."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # it would tell of a proxy that nobody is to ask
    quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)
    own = quiet
    if args.compile:
        own = LoggingConfig(enable_access_log=False)
        print("compiling, which takes minutes; the replicas' logs say how much is done", flush=True)
    with until_told() as wait, ExitStack() as stack:
        before_proxy, inner = None, (host, port)
        if gateway is not None:
            inner = ("127.0.0.1", _free_port())
            before_proxy = Gateway(host, port, [inner], gateway)
            stack.callback(before_proxy.close)
        stack.callback(serve.shutdown)
        serve.start(
            proxy_location="HeadOnly",
            http_options=HTTPOptions(host=inner[0], port=inner[1], request_timeout_s=REQUEST_TIMEOUT_S),
            logging_config=quiet,
        )
        app = build_app(args)
        try:
            serve.run(app, name="ddm", route_prefix="/", logging_config=own)
        except RuntimeError as error:
            parts = serve.status().applications["ddm"].deployments.values()
            reason = next((last_error(part.message) for part in parts if part.message), one_line(error, 300))
            raise ServeError(f"the run can't be served: {reason}") from None
        if before_proxy is not None:
            before_proxy.start(local_replicas("ddm", inner[1]))
        else:
            print("without a gateway (HAProxy, on the head's machine): what dies takes its requests along", flush=True)
        print(greeting, flush=True)
        wait()
        if before_proxy is not None:
            before_proxy.refuse()  # else a request waits until there is nothing left that could answer


def _free_port() -> int:
    """A port that nobody has, of those that aren't given out to whoever connects somewhere meanwhile."""
    while True:
        try:
            with listening("127.0.0.1", random.randrange(20_000, 30_000)) as probe:
                return int(probe.getsockname()[1])
        except ServeError:
            continue


def last_error(message: str) -> str:
    """Return the error that ends what Serve says of a replica that couldn't start: many lines, the traceback's too."""
    last = message.rstrip().rpartition("\n")[2]
    ours = last.startswith(f"{ServeError.__module__}.")
    return last.partition(": ")[2] if ours else last


def _greeting(args: ServeArgs, version: Version, host: str, port: int) -> str:
    data = Run.open(args.run).named.data
    prompt, side = (data.class_names or ("a red bird",))[-1], data.pixel_shape[-1]
    side *= max(1, 256 // side)
    url = f"http://{host}:{port}"
    token = " -H 'Authorization: Bearer TOKEN'" if read_tokens(args.token_file) else ""
    body = f'{{"prompt": "{prompt}", "size": "{side}x{side}", "response_format": "png"}}'
    return (
        f"Serving {args.run} at {url} (routes: {url}/openapi.json) on {args.device}; stop with Ctrl-C.\n"
        f"{_unfinished(version)}"
        f"Open {url}/ in a browser, or try:\n"
        f"  curl {url}/v1/images/generations{token} -H 'Content-Type: application/json' -d '{body}' -o image.png"
    )


def _unfinished(version: Version) -> str:
    """A sentence about networks that still train, if there are any."""
    steps = version.steps().items()
    parts = [f"{name} is of step {weights['step']}" for name, weights in steps if weights and not weights["final"]]
    parts += [f"{name} isn't trained yet" for name, weights in steps if weights is None]
    return f"Not finished: {', '.join(parts)}; newer weights are served as they are published.\n" if parts else ""
