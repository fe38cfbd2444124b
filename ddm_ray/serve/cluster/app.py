"""A run as a Serve application: the only place that names and sizes deployments."""

from dataclasses import replace
from typing import Any

from ray import serve
from ray.serve import Application

from ddm_ray.ray_session import cluster_total
from ddm_ray.sampling.devices import AUTO
from ddm_ray.sampling.run_models import row_networks
from ddm_ray.serve.cluster.args import ServeArgs
from ddm_ray.serve.cluster.codec import Decoder, Encoder
from ddm_ray.serve.cluster.expert_replica import ExpertReplica
from ddm_ray.serve.cluster.ingress import API, DECODER, ENCODER
from ddm_ray.serve.cluster.servable import servable
from ddm_ray.serve.engine.computing import Computing
from ddm_ray.serve.engine.versions import expert_name
from ddm_ray.serve.http.guard import Limits
from ddm_ray.serve.http.meters import DENSE

# Each part takes a small share of a core, so that all find room on a laptop; a config file gives more.
NUM_CPUS = 0.1
# Engines refuse work that they can't do in time; Serve's default of 5 ongoing requests would leave batches empty.
# Weights that can't be loaded at first can't be later: Serve's default of 20 tries would be minutes of silence. Serve
# notices a dead replica after a second, not after ten.
PART: dict[str, Any] = {
    "max_ongoing_requests": 1000,
    "max_constructor_retry_count": 2,
    "health_check_period_s": 1,
    "health_check_timeout_s": 30,
}


def build_app(args: ServeArgs) -> Application:
    """Serve's builder: `application` with advice in terms of a config file."""
    return application(args, Limits())


def application(args: ServeArgs, limits: Limits) -> Application:
    """The ingress `api`, and if placed per expert `expert-000` ..., one replica each unless a config file says more.

    `limits` that aren't arguments. On a cuda device the parts share one GPU unless `ray_actor_options` in the config
    file say otherwise. Raises ServeError for a run without weights, RunError if there is no run, ConfigError for tokens
    or pins that can't be read.
    """
    run, args = servable(args)[0], on_its_device(args)
    on_gpu = args.device.startswith("cuda")
    limits = replace(limits, per_minute=args.per_minute, local=args.local, origins=args.allow_origin)
    resident = args.resident if args.placement == "multiplexed" else None
    shared = (Computing(args.device, args.max_rows, args.precision, args.compile, resident), args.pin_file)
    own = (run.url, *shared, args.refresh_s, args.authenticator(), limits)
    data, clusters = run.config.data, run.config.partition.clusters
    known = row_networks(run)
    encoder = (ENCODER, Encoder, data.text, known.get("text encoder"))
    decoder = (DECODER, Decoder, data.latents, known.get("autoencoder"))
    codecs = [each for each in (encoder, decoder) if each[2]]
    per_expert = args.placement == "per-expert"
    # Rounded down, so that the shares of all parts never need more than one GPU.
    num_parts = (len(clusters) + len(codecs) if per_expert else args.replicas) + (args.dense is not None)
    share = {"num_cpus": NUM_CPUS, "num_gpus": int(1000 / num_parts) / 1000 if on_gpu else 0}

    def replica(name: str, network: int | str) -> Application:
        part = serve.deployment(name=name, ray_actor_options=share, **PART)(ExpertReplica)
        return part.bind(run.url, network, *shared)

    others = {DENSE: replica(DENSE, args.dense)} if args.dense else {}
    if not per_expert:
        ingress = serve.deployment(name="api", num_replicas=args.replicas, ray_actor_options=share, **PART)(API)
        return ingress.bind(*own, (), others, args.dense)
    experts = [replica(expert_name(cluster), cluster) for cluster in clusters]
    for name, kind, config, fingerprint in codecs:
        part = serve.deployment(name=name, ray_actor_options=share, **PART)(kind)
        others[name] = part.bind(config, args.device, fingerprint)
    own_share = {"num_cpus": NUM_CPUS}
    ingress = serve.deployment(name="api", num_replicas=args.replicas, ray_actor_options=own_share, **PART)(API)
    return ingress.bind(*own, experts, others, args.dense)


def on_its_device(args: ServeArgs) -> ServeArgs:
    """The arguments with the device that "auto" means on the connected Ray."""
    return (
        args.model_copy(update={"device": "cuda" if cluster_total("GPU") else "cpu"}) if args.device == AUTO else args
    )
