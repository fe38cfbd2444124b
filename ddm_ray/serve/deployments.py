"""Engines for Serve: one of all experts, or one expert's as a deployment, whose calls any replica can repeat.

Shapes: B rows, CHW image, K experts.
"""

import asyncio
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddm_ray.config import DataConfig, SamplingSettings
from ddm_ray.core.condition import Condition, Text
from ddm_ray.sampling import driver
from ddm_ray.sampling.packing import pack, unpack
from ddm_ray.sampling.request import ExpertCall, MixtureInfo, SampleRequest
from ddm_ray.sampling.run_models import load_model, mixture_info
from ddm_ray.sampling.trajectory import start
from ddm_ray.serve.computing import Computing, in_buckets
from ddm_ray.serve.engine import BatchEngine
from ddm_ray.serve.remote import Arrays, from_arrays
from ddm_ray.serve.scheduler import Scheduler, Speed
from ddm_ray.storage.graph import ROUTER
from ddm_ray.storage.run import Run

Floats = NDArray[np.float32]


def local_engine(run: Run, clusters: list[int], computing: Computing) -> BatchEngine:
    """An engine with these experts of a run and its router, warm and running.

    Raises MissingArtifact, CorruptArtifact, DriftError, and ServeError if networks are to be compiled and can't be.
    """
    torch.set_num_threads(1)
    info, device = mixture_info(run), computing.device
    names = [*(run.experts[cluster] for cluster in clusters), ROUTER]
    networks: dict[str, Any] = {str(name): load_model(run, name, device, computing.precision) for name in names}
    if computing.compile:
        networks = in_buckets(networks, *_largest_call(run, info, computing))
    experts: list[driver.Field | None] = [None] * info.num_experts
    for cluster in clusters:
        experts[cluster] = networks[str(run.experts[cluster])]
    answer = partial(driver.answers, experts=experts, router=networks[str(ROUTER)])
    here_K = None if len(clusters) == info.num_experts else np.isin(np.arange(info.num_experts), clusters)
    engine = BatchEngine(answer, here_K, Scheduler(computing.max_rows))
    warm_up(engine, run, clusters, device)
    engine.start()
    return engine


def warm_up(engine: BatchEngine, run: Run, clusters: list[int], device: str) -> None:
    """Run a few velocities of one row and of many, so that the engine knows its speed before the first request."""
    settings, info = SamplingSettings(strategy="oracle", steps=3), mixture_info(run)
    for number, count in enumerate((1, 1, engine.scheduler.max_rows)):
        if number == 1:
            engine.scheduler.speed = Speed()  # what runs first is slower than it ever will be
        cluster_B = torch.tensor(clusters)[torch.arange(count) % len(clusters)]
        request = SampleRequest(tuple(range(count)), _any_condition(run.config.data, count), settings, cluster_B)
        future = engine.submit(start(request, info, device), np.inf)
        while not future.done():
            engine.tick()
        future.result()


def _largest_call(run: Run, info: MixtureInfo, computing: Computing) -> tuple[Tensor, Tensor, Condition]:
    """A call of a network by a full batch of rows that are all guided: each is there twice."""
    count = 2 * computing.max_rows
    x_BCHW = torch.randn(count, *info.image_shape, dtype=info.dtype, device=computing.device)
    condition = _any_condition(run.config.data, count).to(computing.device)
    return x_BCHW, torch.linspace(0, 1, count, dtype=info.dtype, device=computing.device), condition


def _any_condition(data: DataConfig, count: int) -> Condition:
    if data.text is None:
        return torch.arange(count) % max(1, data.num_classes or 0)
    tokens, dim, pooled_dim = data.text.tokens, data.text.dim, data.text.pooled_dim
    pooled_BP = None if pooled_dim is None else torch.zeros(count, pooled_dim)
    return Text(torch.zeros(count, tokens, dim), torch.ones(count, tokens, dtype=torch.bool), pooled_BP)


class ExpertReplica:
    """One expert of a run and the router, in an engine of their own."""

    def __init__(self, run_url: str, cluster: int, computing: Computing):
        """Loads verified weights. Raises as `local_engine` does."""
        run = Run.open(run_url)
        self._cluster, self._device, self._info = cluster, computing.device, mixture_info(run)
        self._engine = local_engine(run, [cluster], computing)

    async def run(self, packed: bytes, seconds: float | None, until: int | None) -> tuple[bytes, NDArray[np.int64]]:
        """A segment of packed rows (`sampling.packing`), and the expert that each needs then: `BatchEngine.submit`."""
        rows = unpack(packed, self._info, self._device)
        segment = await asyncio.wrap_future(self._engine.submit(rows, seconds, until))
        return pack(segment.rows), segment.needed_B

    async def velocity(self, x_BCHW: Floats, t_B: Floats, condition: Arrays) -> Floats:
        """Velocity (B, C, H, W) of this expert alone at x_BCHW, t_B in [0, 1], batched with others' calls."""
        x, t = (torch.tensor(part, device=self._device) for part in (x_BCHW, t_B))
        call = ExpertCall(self._cluster, x, t, from_arrays(condition).to(self._device))
        return (await asyncio.wrap_future(self._engine.ask(call))).float().cpu().numpy()

    def check_health(self) -> None:
        """Raise ServeError if the engine has stopped: Serve puts another replica in this one's place."""
        self._engine.require_running()

    def __del__(self) -> None:
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine.close(1.0)
