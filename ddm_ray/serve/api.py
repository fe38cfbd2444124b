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
from ddm_ray.sampling.run_models import load_model, mixture_info, sampling_settings
from ddm_ray.serve.answers import expert_name
from ddm_ray.serve.codec import Decoder, Encoder
from ddm_ray.serve.deployments import local_engine, multiplexed_engines
from ddm_ray.serve.engine import BatchEngine
from ddm_ray.serve.guard import Guard, Limits
from ddm_ray.serve.http import Service, http_app
from ddm_ray.serve.meters import Meters
from ddm_ray.serve.multiplexed import Multiplexer
from ddm_ray.serve.remote import RemoteEngine, Replicas, answer_from, called, from_arrays
from ddm_ray.serve.scheduler import Scheduler
from ddm_ray.serve.segments import LocalEngine, SegmentSampler
from ddm_ray.storage.graph import ROUTER
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
        tokens: frozenset[bytes],
        limits: Limits,
        experts: Sequence[Handle] = (),
        codecs: Mapping[str, Handle] | None = None,
        resident: int | None = None,
        dtype: str = "float32",
    ):
        """Load all networks of a run, or take deployments: experts by cluster, ENCODER and DECODER by name.

        `resident` experts are on the device at a time (None: all). `ServeArgs` has the others.

        Raises RunError, MissingArtifact, CorruptArtifact, DriftError, ConfigError.
        """
        self._run = run = Run.open(run_url)
        self._guarded = (tokens, limits)
        self._replicas, self._names = Replicas(serve.get_replica_context().app_name), list[str]()
        self._encode, self._decode = self._codecs(run, device, codecs)
        info = mixture_info(run)
        if self._encode is not None:
            null = from_arrays(await self._encode(""))
            assert isinstance(null, Text)
            info = replace(info, null_text=null)
        self._engine: BatchEngine | Multiplexer
        if resident is not None:
            engines = multiplexed_engines(run, device, max_rows, resident, getattr(torch, dtype))
            self._engine, mixing = engines, LocalEngine(engines.mixing)
            runners: list[Any] = [LocalEngine(engine) for engine in engines.of_expert]
        elif not experts:
            self._engine = local_engine(run, list(range(info.num_experts)), device, max_rows)
            mixing = LocalEngine(self._engine)
            runners = [mixing] * info.num_experts
        else:
            runners = [RemoteEngine(handle, k, info, self._replicas) for k, handle in enumerate(experts)]
            self._engine = BatchEngine(answer_from(runners, load_model(run, ROUTER)), scheduler=Scheduler(max_rows))
            self._engine.start()
            mixing = LocalEngine(self._engine)
            self._names = [handle.deployment_name for handle in (*experts, *(codecs or {}).values())]
        self._meters = Meters(self._engine)
        self._sampler = SegmentSampler(info, runners, mixing, self._count, "cpu" if experts else device)

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
                self._sampler,
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
        self._engine.require_running()

    async def _condition(self, prompt: str) -> Condition:
        return from_arrays(await self._encode(prompt))

    async def _images(self, latents_BCHW: Tensor) -> Tensor:
        images = await asyncio.gather(*(self._decode(latent_CHW.numpy()) for latent_CHW in latents_BCHW))
        return torch.stack([torch.tensor(image_CHW) for image_CHW in images])

    def _count(self, expert: int, velocities: int, switched: int) -> None:
        self._meters.segment("all" if expert < 0 else expert_name(expert), velocities, switched)

    async def _lacking(self) -> list[str]:
        return [name for name in self._names if await self._replicas.lacking(name)]

    def __del__(self) -> None:
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine.close(1.0)
