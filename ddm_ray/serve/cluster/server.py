"""A server in the foreground: Serve with one application, the gateway before it, and their end by a signal."""

import json
import logging
import random
import signal
from collections.abc import Callable
from contextlib import ExitStack

from ray import serve
from ray.serve.config import HTTPOptions
from ray.serve.schema import LoggingConfig

from ddm_ray.data import OnProgress, no_progress, phase
from ddm_ray.errors import ServeError
from ddm_ray.ray_session import cluster_total, on_head, ray_session
from ddm_ray.remedies import Fix, Give
from ddm_ray.run.run import Run
from ddm_ray.serve.cluster.addresses import listen_on, url_at
from ddm_ray.serve.cluster.app import application, on_its_device
from ddm_ray.serve.cluster.args import ServeArgs
from ddm_ray.serve.cluster.direct_ingress import local_replicas
from ddm_ray.serve.cluster.gateway import Gateway
from ddm_ray.serve.cluster.haproxy import find_haproxy
from ddm_ray.serve.cluster.servable import opening_advice, require_servable, sound_version
from ddm_ray.serve.cluster.start import CHECKED, RAY, SERVE, shown
from ddm_ray.serve.engine.scheduler import REQUEST_TIMEOUT_S
from ddm_ray.serve.engine.versions import Version
from ddm_ray.serve.http.guard import Limits
from ddm_ray.signals import first_signal_noted
from ddm_ray.spelling import one_line, shell_line


def serve_run(
    args: ServeArgs,
    port: int,
    host: str = "127.0.0.1",
    address: str | None = None,
    insecure: bool = False,
    on_progress: OnProgress = no_progress,
    phrase: Callable[[Fix], str] = str,
) -> None:
    """Serve a run over HTTP until SIGINT or SIGTERM; call it on the main thread.

    `on_progress` shows the start, which has ended at the share 1. `phrase` makes words of what refusals advise.

    It runs on the Ray that `ray_session` finds for `address`; call `environment.prepare_serve` before this module is
    imported. Raises as `require_servable` and `sound_version`, and ServeError if Serve is running there already.
    """
    args = require_servable(args, port, host, insecure, phrase)
    version = sound_version(args, phase(on_progress, 0.0, CHECKED))
    on_progress(RAY, "starting Ray")
    with ray_session(address):
        if serve.status().proxies:
            raise ServeError(
                "Serve already runs in this Ray cluster; add the run with serve deploy (see serving/mixture.yaml)"
            )
        args = on_its_device(args)
        if args.device == "cpu" and (gpus := cluster_total("GPU")):
            print(f"warning: {gpus:g} GPUs of this Ray stand idle; device cuda computes there", flush=True)
        gateway = find_haproxy() if on_head() else None  # where Serve's proxy is
        _serve_until_stopped(args, _advising(phrase), port, host, version, gateway, on_progress)


def _advising(phrase: Callable[[Fix], str]) -> Limits:
    other_origins = phrase(Give("allow_origin", "allow its origin", "ORIGIN"))
    return Limits(other_names=opening_advice(phrase), other_origins=other_origins)


def _serve_until_stopped(
    args: ServeArgs,
    limits: Limits,
    port: int,
    host: str,
    version: Version,
    gateway: str | None,
    on_progress: OnProgress,
) -> None:
    """Serve and wait; `gateway`: the program HAProxy, which then listens in place of Serve's proxy."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # it would print the address of a proxy behind the gateway
    quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)
    own = quiet
    if args.compile:
        own = LoggingConfig(enable_access_log=False)
        print("compiling, which takes minutes; the replicas' logs say how much is done", flush=True)
    with first_signal_noted(signal.SIGINT, second_ends=False) as came, ExitStack() as stack:
        before_proxy, inner = None, (host, port)
        if gateway is not None:
            inner = ("127.0.0.1", _free_port())
            before_proxy = Gateway(host, port, [inner], gateway)
            stack.callback(before_proxy.close)
        stack.callback(serve.shutdown)
        on_progress(SERVE, "starting Serve")
        serve.start(
            proxy_location="HeadOnly",
            http_options=HTTPOptions(host=inner[0], port=inner[1], request_timeout_s=REQUEST_TIMEOUT_S),
            logging_config=quiet,
        )
        app = application(args, limits)
        try:
            with shown(on_progress, "ddm", "compiling networks" if args.compile else "loading networks"):
                serve.run(app, name="ddm", route_prefix="/", logging_config=own)
        except RuntimeError as error:
            parts = serve.status().applications["ddm"].deployments.values()
            reason = next((last_error(part.message) for part in parts if part.message), one_line(error, 300))
            raise ServeError(f"the run can't be served: {reason}") from None
        if before_proxy is not None:
            before_proxy.start(local_replicas("ddm", inner[1]))
        else:
            print(
                "without a gateway (HAProxy, on the head's machine): a process that dies loses its requests", flush=True
            )
        on_progress(1.0, f"ready at {url_at(host, port)}")
        print(_greeting(args, version, host, port), flush=True)
        came.wait()
        if before_proxy is not None:
            before_proxy.refuse()  # else requests would wait until no process is left to answer


def _free_port() -> int:
    """A free port below those that the kernel gives to outgoing connections, one of which could take it meanwhile."""
    while True:
        try:
            with listen_on("127.0.0.1", random.randrange(20_000, 30_000)) as probe:
                return int(probe.getsockname()[1])
        except ServeError:
            continue


def last_error(message: str) -> str:
    """Return the error at the end of Serve's message on a replica that couldn't start, which has a traceback, too."""
    last = message.rstrip().rpartition("\n")[2]
    ours = last.startswith(f"{ServeError.__module__}.")
    return last.partition(": ")[2] if ours else last


def _greeting(args: ServeArgs, version: Version, host: str, port: int) -> str:
    data = Run.open(args.run).named.data
    prompt, side = (data.class_names or ("a red bird",))[-1], data.pixel_shape[-1]
    side *= max(1, 256 // side)
    url = url_at(host, port)
    authenticator = args.authenticator()
    token = "" if authenticator is None else f" -H '{authenticator.header}'"
    fields = {"prompt": prompt, "size": f"{side}x{side}", "response_format": "png"}
    body = shell_line(json.dumps(fields, ensure_ascii=False))
    return (
        f"Serving {args.run} at {url} (routes: {url}/openapi.json) on {args.device}; stop with Ctrl-C.\n"
        f"{_unfinished(version)}"
        f"Open {url}/ in a browser, or try:\n"
        f"  curl {url}/v1/images/generations{token} -H 'Content-Type: application/json' -d {body} -o image.png"
    )


def _unfinished(version: Version) -> str:
    """A sentence about networks that still train, if there are any."""
    steps = version.steps().items()
    parts = [f"{name} is of step {weights['step']}" for name, weights in steps if weights and not weights["final"]]
    parts += [f"{name} isn't trained yet" for name, weights in steps if weights is None]
    return f"Not finished: {', '.join(parts)}; newer weights are served as they are published.\n" if parts else ""
