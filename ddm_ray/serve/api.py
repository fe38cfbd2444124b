"""The ingress as a deployment: an application over the experts of this process, or over those of other deployments."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from ray import serve
from ray.serve.handle import DeploymentHandle
from torch import Tensor

from ddm_ray.core.condition import Condition, Text
from ddm_ray.sampling.run_models import mixture_info, sampling_settings
from ddm_ray.serve.answers import expert_name
from ddm_ray.serve.codec import Decoder, Encoder
from ddm_ray.serve.deployments import local_engine
from ddm_ray.serve.engine import BatchEngine
from ddm_ray.serve.guard import Guard, Limits
from ddm_ray.serve.http import Service, http_app
from ddm_ray.serve.meters import Meters
from ddm_ray.serve.remote import RemoteEngine, Replicas, answer_from, called, from_arrays
from ddm_ray.serve.scheduler import Scheduler
from ddm_ray.serve.segments import LocalEngine, SegmentSampler
from ddm_ray.serve.versions import LOG, LiveSampler, Networks, Version, Versions, follow
from ddm_ray.storage.published import Weights
from ddm_ray.storage.run import Run

ENCODER, DECODER = "encoder", "decoder"
Handle = DeploymentHandle[Any]


@serve.ingress()
class API:
    """Answers requests for images, by networks of its own or by those of other deployments."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        run_url: str,
        device: str,
        max_rows: int,
        pin_file: str | None,
        refresh_s: float,
        tokens: frozenset[bytes],
        limits: Limits,
        experts: Sequence[Handle] = (),
        codecs: Mapping[str, Handle] | None = None,
    ):
        """Load all networks of a run, or take deployments: experts by cluster, ENCODER and DECODER by name.

        `ServeArgs` has the others. Raises RunError, MissingArtifact, CorruptArtifact, DriftError, ConfigError.
        """
        self._run = run = Run.open(run_url)
        self._guarded = (tokens, limits)
        self._replicas, self._names = Replicas(serve.get_replica_context().app_name), list[str]()
        self._encode, self._decode = self._codecs(run, device, codecs)
        self._info = mixture_info(run)
        if self._encode is not None:
            null = from_arrays(await self._encode(""))
            assert isinstance(null, Text)
            self._info = replace(self._info, null_text=null)
        self._experts, self._max_rows = experts, max_rows
        self._names = [handle.deployment_name for handle in (*experts, *(codecs or {}).values())]
        self._networks = Networks(run, "cpu" if experts else device)
        versions = Versions(run, pin_file)
        self._live = LiveSampler(*await self._made(await versions.loadable(self._load_here)))
        self._meters = Meters(lambda: self._live.engine)
        self._meters.serves(self._live.version.steps())
        self._following = asyncio.ensure_future(follow(versions, self._live, self._load, self._put, refresh_s))

    async def _load_here(self, version: Version, weights: Weights) -> bool:
        if self._experts and weights.artifact.cluster is not None:
            return False
        await asyncio.to_thread(self._networks.of, weights)
        return True

    async def _load(self, version: Version, weights: Weights) -> bool:
        cluster = weights.artifact.cluster
        there = bool(self._experts) and cluster is not None and await self._loaded_there(version, cluster)
        return there or await self._load_here(version, weights)

    async def _loaded_there(self, version: Version, cluster: int) -> bool:
        """Have an expert's replica load its weights of a version; False if none runs, as one that sleeps."""
        handle = self._experts[cluster]
        if not await self._replicas.running(handle.deployment_name):
            return False
        await called(handle.load, None, version.pair(cluster))
        return True

    async def _put(self, version: Version) -> None:
        """Serve these weights from the next request on."""
        if self._experts:
            await asyncio.gather(*(self._loaded_there(version, cluster) for cluster in range(len(self._experts))))
        self._live.replace(*await self._made(version))
        self._networks.keep(list(version))
        self._meters.serves(version.steps())
        LOG.info("serving %s", version.steps())

    async def _made(self, version: Version) -> tuple[Version, SegmentSampler, BatchEngine]:
        """A sampler of these weights, and its engine here."""
        has = [weights is not None for weights in version.experts]
        runners: list[Any]
        if not self._experts:
            clusters = list(range(len(has)))
            engine = await asyncio.to_thread(local_engine, version, clusters, self._networks, self._max_rows)
            mixing = LocalEngine(engine)
            runners = [mixing if here else None for here in has]
        else:
            runners = [
                RemoteEngine(handle, k, self._info, self._replicas, version.pair(k)) if has[k] else None
                for k, handle in enumerate(self._experts)
            ]
            router = None if version.router is None else self._networks.of(version.router)
            engine = BatchEngine(answer_from(runners, router), scheduler=Scheduler(self._max_rows))
            engine.start()
            mixing = LocalEngine(engine)
        sampler = SegmentSampler(self._info, runners, mixing, self._count, self._networks.device)
        return version, sampler, engine

    @staticmethod
    def _codecs(run: Run, device: str, codecs: Mapping[str, Handle] | None) -> tuple[Any, Any]:
        """Methods that encode a text and decode a latent, each None where the run has no such network."""
        if codecs is not None:
            encoder, decoder = codecs.get(ENCODER), codecs.get(DECODER)
            encode = None if encoder is None else partial(called, encoder.encode, None)
            return encode, None if decoder is None else partial(called, decoder.decode, None)
        data = run.config.data
        return (
            None if data.text is None else Encoder(data.text, device).encode,
            None if data.latents is None else Decoder(data.latents, device).decode,
        )

    def __serve_build_asgi_app__(self) -> Guard:
        """Build the application that Serve hands requests to."""
        http = http_app(
            Service(
                self._live,
                self._run.config,
                sampling_settings(self._run),
                self._meters,
                self._lacking,
                self._condition if self._encode else None,
                self._images if self._decode else None,
            )
        )
        routes = {str(getattr(route, "path", "")) for route in http.routes}

        def count(path: str, status: int) -> None:
            self._meters.answers.labels(path if path in routes else "other", str(status)).inc()

        return Guard(http, *self._guarded, on_answer=count)

    def check_health(self) -> None:
        """Raise ServeError if the engine has stopped: Serve puts another replica in this one's place."""
        self._live.engine.require_running()

    async def _condition(self, prompt: str) -> Condition:
        return from_arrays(await self._encode(prompt))

    async def _images(self, latents_BCHW: Tensor) -> Tensor:
        images = await asyncio.gather(*(self._decode(latent_CHW.numpy()) for latent_CHW in latents_BCHW))
        return torch.stack([torch.tensor(image_CHW) for image_CHW in images])

    def _count(self, expert: int, velocities: int, switched: int, waited_s: float | None) -> None:
        self._meters.segment("all" if expert < 0 else expert_name(expert), velocities, switched, waited_s)

    async def _lacking(self) -> list[str]:
        return [name for name in self._names if await self._replicas.lacking(name)]

    def __del__(self) -> None:
        live = getattr(self, "_live", None)
        if live is not None:
            live.engine.close(1.0)
