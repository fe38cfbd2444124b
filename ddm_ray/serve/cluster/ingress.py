"""The ingress as a deployment: the HTTP application, with the experts in its process or in other deployments."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from ray import serve
from torch import Tensor

from ddm_ray.config import SamplingSettings
from ddm_ray.core.condition import Text
from ddm_ray.run.run import Run
from ddm_ray.sampling.request import MixtureInfo
from ddm_ray.sampling.run_models import (
    ModelKind,
    mixture_info,
    monolith_info,
    row_networks,
    sampling_settings,
    settings_of,
)
from ddm_ray.serve.cluster.codec import Arrays, Decoder, Encoder, from_arrays
from ddm_ray.serve.cluster.mixture import FactsOf, Handle, ServedMixture
from ddm_ray.serve.cluster.remote_runner import call_deployment
from ddm_ray.serve.cluster.replicas import Replicas
from ddm_ray.serve.engine.computing import Computing, Networks
from ddm_ray.serve.engine.versions import Versions
from ddm_ray.serve.http.authentication import Authenticator
from ddm_ray.serve.http.guard import Guard, Limits
from ddm_ray.serve.http.meters import DENSE, Meters
from ddm_ray.serve.http.routes import http_app
from ddm_ray.serve.http.service import ServedModel, Service

ENCODER, DECODER = "encoder", "decoder"
Encode = Callable[[str], Awaitable[tuple[Arrays, int]]]
"""Returns the arrays of a text, one row, and its number of tokens."""
Decode = Callable[[NDArray[np.float32]], Awaitable[NDArray[np.float32]]]
"""Returns the image (C, H, W) of one latent (C, H, W)."""


@serve.ingress()
class API:
    """Answers requests for images, with networks of its own or those of other deployments."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        run_url: str,
        computing: Computing,
        pin_file: str | None,
        refresh_s: float,
        authenticator: Authenticator | None,
        limits: Limits,
        experts: Sequence[Handle] = (),
        others: Mapping[str, Handle] | None = None,
        dense: ModelKind | None = None,
    ):
        """Load all networks of a run, or take deployments: experts by cluster, ENCODER, DECODER and DENSE by name.

        DENSE has the network `dense`. `ServeArgs` has the rest. Raises RunError, CorruptArtifact, DriftError,
        ConfigError.
        """
        self._run = run = Run.open(run_url)
        others = others or {}
        self._guarded = (authenticator, limits)
        self._replicas = Replicas(serve.get_replica_context().app_name)
        self._names = [handle.deployment_name for handle in (*experts, *others.values())]
        self._encode, self._decode = self._codecs(run, computing.device, others if experts else None)
        null = None if self._encode is None else from_arrays((await self._encode(""))[0])
        self._meters = Meters(lambda: self._mixture.live.engine)

        def served(facts_of: FactsOf, parts: Sequence[Handle], label: str | None = None) -> ServedMixture:
            def with_null(run: Run) -> tuple[MixtureInfo, SamplingSettings]:
                info, defaults = facts_of(run)
                return replace(info, null_text=null), defaults

            # With experts in other deployments, only a router is here.
            own = Computing(max_rows=computing.max_rows) if parts else computing
            data, networks = run.config.data, Networks(run.config.data, facts_of(run)[0], own)
            return ServedMixture(with_null, networks, data, parts, self._replicas, self._meters, label)

        self._mixture = served(lambda run: (mixture_info(run), sampling_settings(run)), experts)
        await self._mixture.start(Versions(run, pin_file), refresh_s)
        name = run.config.name
        self._models = {name: ServedModel(self._mixture.live)}
        if dense is not None:
            settings = settings_of(run, dense).changed(strategy=None)
            self._dense = served(lambda run: (monolith_info(run, dense), settings), [others[DENSE]], DENSE)
            await self._dense.start(Versions(run, pin_file, dense), refresh_s)
            self._models[f"{name}-{dense}"] = ServedModel(self._dense.live, alone=True)

    @staticmethod
    def _codecs(run: Run, device: str, codecs: Mapping[str, Handle] | None) -> tuple[Encode | None, Decode | None]:
        """Methods that encode a text and decode a latent; None: the run has no such network."""
        if codecs is not None:
            encoder, decoder = codecs.get(ENCODER), codecs.get(DECODER)
            encode = None if encoder is None else partial(call_deployment, encoder.encode, None)
            return encode, None if decoder is None else partial(call_deployment, decoder.decode, None)
        data, known = run.config.data, row_networks(run)
        text, autoencoder = known.get("text encoder"), known.get("autoencoder")
        return (
            None if data.text is None else Encoder(data.text, device, text).encode,
            None if data.latents is None else Decoder(data.latents, device, autoencoder).decode,
        )

    def __serve_build_asgi_app__(self) -> Guard:
        """Build the application that Serve hands requests to."""
        http = http_app(
            Service(
                self._run.named,
                self._models,
                self._meters,
                self._lacking,
                self._condition if self._encode else None,
                self._images if self._decode else None,
                self._run.credit,
            )
        )
        routes = {str(getattr(route, "path", "")) for route in http.routes}

        def count(path: str, status: int) -> None:
            self._meters.answers.labels(path if path in routes else "other", str(status)).inc()

        return Guard(http, *self._guarded, on_answer=count)

    def check_health(self) -> None:
        """Raise ServeError if the engine has stopped: Serve puts another replica in this one's place."""
        self._mixture.live.engine.require_running()

    async def _condition(self, prompt: str) -> tuple[Text, int]:
        assert self._encode is not None
        arrays, length = await self._encode(prompt)
        return from_arrays(arrays), length

    async def _images(self, latents_BCHW: Tensor) -> Tensor:
        assert self._decode is not None
        images = await asyncio.gather(*(self._decode(latent_CHW.numpy()) for latent_CHW in latents_BCHW))
        return torch.stack([torch.tensor(image_CHW) for image_CHW in images])

    async def _lacking(self) -> list[str]:
        replicas = self._replicas
        return [name for name in self._names if replicas.is_unable(name) or await replicas.lacking(name)]

    def __del__(self) -> None:
        mixture = getattr(self, "_mixture", None)
        if mixture is not None:
            mixture.live.engine.close(1.0)
