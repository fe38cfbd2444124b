"""Engines for Serve: one of all experts, or one expert's as a deployment, whose calls any replica can repeat.

Shapes: B rows, CHW image, K experts.
"""

import asyncio
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from ddm_ray.config import DataConfig, SamplingSettings
from ddm_ray.core.condition import Condition, Text
from ddm_ray.sampling import driver
from ddm_ray.sampling.offload import OffloadedToHost
from ddm_ray.sampling.packing import pack, unpack
from ddm_ray.sampling.request import ExpertCall, SampleRequest
from ddm_ray.sampling.run_models import load_model, mixture_info
from ddm_ray.sampling.trajectory import start
from ddm_ray.serve.engine import BatchEngine
from ddm_ray.serve.multiplexed import Multiplexer
from ddm_ray.serve.remote import Arrays, from_arrays
from ddm_ray.serve.scheduler import Scheduler
from ddm_ray.storage.graph import ROUTER
from ddm_ray.storage.run import Run

Floats = NDArray[np.float32]


def local_engine(run: Run, clusters: list[int], device: str, max_rows: int) -> BatchEngine:
    """An engine with these experts of a run and its router, warm and running.

    `max_rows` of a batch. Raises MissingArtifact, CorruptArtifact, DriftError.
    """
    torch.set_num_threads(1)
    info = mixture_info(run)
    experts: list[driver.Field | None] = [None] * info.num_experts
    for cluster in clusters:
        experts[cluster] = load_model(run, run.experts[cluster], device)
    answer = partial(driver.answers, experts=experts, router=load_model(run, ROUTER, device))
    here_K = None if len(clusters) == info.num_experts else np.isin(np.arange(info.num_experts), clusters)
    engine = BatchEngine(answer, here_K, Scheduler(max_rows))
    warm_up(engine, run, clusters, device)
    engine.start()
    return engine


def multiplexed_engines(
    run: Run, device: str, max_rows: int, resident: int, dtype: torch.dtype = torch.float32
) -> Multiplexer:
    """Engines of all experts of a run, whose weights are in host memory, `resident` on the device; warm and running.

    `dtype` in which they are kept: float32 or bfloat16, see `sampling.flat.Flat`. Raises as `local_engine`.
    """
    torch.set_num_threads(1)
    clusters = list(range(mixture_info(run).num_experts))

    def load(cluster: int) -> torch.nn.Module:
        return load_model(run, run.experts[cluster])

    experts = OffloadedToHost(load, [True] * len(clusters), device, resident, dtype)
    multiplexer = Multiplexer(experts, load_model(run, ROUTER, device), max_rows)
    warm_up(multiplexer.of_expert[0], run, [0], device)
    warm_up(multiplexer.mixing, run, clusters, device)
    multiplexer.start()
    return multiplexer


def warm_up(engine: BatchEngine, run: Run, clusters: list[int], device: str) -> None:
    """Run a few velocities of one row and of many, so that the engine knows its speed before the first request."""
    settings, info = SamplingSettings(strategy="oracle", steps=3), mixture_info(run)
    for number, count in enumerate((1, 1, engine.scheduler.max_rows)):
        if number == 1:
            engine.scheduler.speed.forget()  # what runs first is slower than it ever will be
        cluster_B = torch.tensor(clusters)[torch.arange(count) % len(clusters)]
        request = SampleRequest(tuple(range(count)), _any_condition(run.config.data, count), settings, cluster_B)
        future = engine.submit(start(request, info, device), np.inf)
        while not future.done():
            engine.tick()
        future.result()


def _any_condition(data: DataConfig, count: int) -> Condition:
    if data.text is None:
        return torch.arange(count) % max(1, data.num_classes or 0)
    tokens, dim, pooled_dim = data.text.tokens, data.text.dim, data.text.pooled_dim
    pooled_BP = None if pooled_dim is None else torch.zeros(count, pooled_dim)
    return Text(torch.zeros(count, tokens, dim), torch.ones(count, tokens, dtype=torch.bool), pooled_BP)


class ExpertReplica:
    """One expert of a run and the router, in an engine of their own."""

    def __init__(self, run_url: str, cluster: int, device: str, max_rows: int):
        """Loads verified weights. Raises MissingArtifact, CorruptArtifact, DriftError."""
        run = Run.open(run_url)
        self._cluster, self._device, self._info = cluster, device, mixture_info(run)
        self._engine = local_engine(run, [cluster], device, max_rows)

    async def run(self, packed: bytes, seconds: float | None, until: int | None) -> tuple[bytes, NDArray[np.int64]]:
        """A segment of packed rows (`sampling.packing`), and the expert that each needs then: `BatchEngine.submit`."""
        rows = unpack(packed, self._info, self._device)
        segment = await asyncio.wrap_future(self._engine.submit(rows, seconds, until))
        return pack(segment.rows), segment.needed_B

    async def velocity(self, x_BCHW: Floats, t_B: Floats, condition: Arrays) -> Floats:
        """Velocity (B, C, H, W) of this expert alone at x_BCHW, t_B in [0, 1], batched with others' calls."""
        x, t = (torch.tensor(part, device=self._device) for part in (x_BCHW, t_B))
        call = ExpertCall(self._cluster, x, t, from_arrays(condition).to(self._device))
        return (await asyncio.wrap_future(self._engine.ask(call))).cpu().numpy()

    def check_health(self) -> None:
        """Raise ServeError if the engine has stopped: Serve puts another replica in this one's place."""
        self._engine.require_running()

    def __del__(self) -> None:
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine.close(1.0)
