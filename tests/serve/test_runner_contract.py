"""What every Runner promises, colocated, multiplexed or per expert: one test for all placements. No Ray."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from ray.serve.schema import DeploymentStatusOverview
from torch import Tensor

from ddm_ray.config import SamplingSettings
from ddm_ray.errors import ServeError
from ddm_ray.run.run import Run
from ddm_ray.sampling.request import SampleRequest
from ddm_ray.sampling.run_models import load_models, mixture_info
from ddm_ray.sampling.state import Trajectories
from ddm_ray.sampling.trajectory import start
from ddm_ray.serve.cluster import expert_replica
from ddm_ray.serve.cluster.expert_replica import ExpertReplica
from ddm_ray.serve.cluster.mixture import ServedMixture
from ddm_ray.serve.cluster.replicas import Replicas
from ddm_ray.serve.engine.computing import Computing, Networks
from ddm_ray.serve.engine.runner import DeadlineError, Runner, Runners
from ddm_ray.serve.engine.scheduler import OverloadedError
from ddm_ray.serve.engine.versions import Versions
from ddm_ray.serve.http.meters import Meters
from tests.serve.cluster.linked import HOST, Response, until
from tests.serve.conftest import replica_of

PLACEMENTS = ("colocated", "multiplexed", "per-expert")
TOLERANCE = 1e-5
SECONDS = 60.0
OF_ONE = SampleRequest(
    (3, 4), torch.tensor([1, 7]), SamplingSettings(strategy="oracle", steps=5), cluster_B=torch.tensor([1, 1])
)


class Call:
    """What Serve's handle gives for a call: it runs at once, can be awaited, and can be cancelled."""

    def __init__(self, work: Any):
        self._task = asyncio.ensure_future(work)

    def __await__(self) -> Generator[Any, None, Any]:
        return self._task.__await__()

    def cancel(self) -> None:
        self._task.cancel()


class Method:
    def __init__(self, call: Callable[..., Any]):
        self.remote = call


class Handle:
    """Serve's handle of an expert's deployment, with one replica in this process."""

    def __init__(self, replica: ExpertReplica, expert: int):
        self._replica, self.deployment_name = replica, f"expert-{expert:03d}"
        for name in ("run", "velocity", "load"):
            setattr(self, name, Method(partial(self._called, getattr(replica, name))))

    @staticmethod
    def _called(method: Callable[..., Awaitable[Any]], *arguments: Any) -> Call:
        return Call(method(*arguments))

    def options(self, method_name: str, stream: bool) -> Method:
        assert stream
        return Method(lambda *arguments: Response(getattr(self._replica, method_name)(*arguments)))


class Alive(Replicas):
    """States of deployments that all have a replica; there is no Serve to ask."""

    async def running(self, deployment: str) -> bool:
        return True

    async def overview(self, deployment: str) -> DeploymentStatusOverview:
        raise ServeError("no Serve runs")


async def mixture_of(run: Run, placement: str) -> ServedMixture:
    """A run's mixture as the ingress serves it."""
    handles = list[Any]()
    if placement == "per-expert":
        for cluster in run.config.partition.clusters:
            handles.append(Handle(await replica_of(run, cluster), cluster))
    computing = Computing(max_rows=8, resident=2 if placement == "multiplexed" else None)
    networks = Networks(run.config.data, mixture_info(run), computing)
    parts = (handles, Alive("none"), Meters(lambda: mixture.live.engine))
    mixture = ServedMixture(lambda each: (mixture_info(each), each.config.sample), networks, run.config.data, *parts)
    return mixture


@asynccontextmanager
async def placed(run: Run, placement: str) -> AsyncIterator[Runners]:
    """The runners of a run's newest weights, as the ingress makes them."""
    mixture = await mixture_of(run, placement)
    runners = await mixture._runners(mixture_info(run), Versions(run).newest())
    try:
        yield runners
    finally:
        await asyncio.to_thread(runners.engine.close)


@pytest.fixture(autouse=True)
def on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_replica, "get_node_ip_address", lambda: HOST)


def with_runners(run: Run, placement: str, work: Callable[[Runners], Awaitable[None]]) -> None:
    async def done() -> None:
        async with placed(run, placement) as runners:
            await work(runners)

    asyncio.run(asyncio.wait_for(done(), 2 * SECONDS))


def of_expert(runners: Runners, expert: int) -> Runner:
    runner = runners.of_expert[expert]
    assert runner is not None and not runner.away
    return runner


def rows_of(run: Run, request: SampleRequest) -> Trajectories:
    with torch.inference_mode():
        return start(request, mixture_info(run))


def right(run: Run, request: SampleRequest) -> Tensor:
    return load_models(run).sample(request).images_BCHW


def assert_equal(images_BCHW: Tensor, right_BCHW: Tensor) -> None:
    assert torch.allclose(images_BCHW, right_BCHW, atol=TOLERANCE)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_segment_ends_as_the_pipeline_does(tiny_run: Run, placement: str) -> None:
    """In one segment and in two; the rows that were given stay as they are."""

    async def work(runners: Runners) -> None:
        rows, runner = rows_of(tiny_run, OF_ONE), of_expert(runners, 1)
        segment = await runner.run(rows, SECONDS, None)
        assert segment.needed_B.tolist() == [-1, -1] and segment.rows.done_B.all() and segment.waited_s >= 0
        assert_equal(segment.rows.result().images_BCHW, right(tiny_run, OF_ONE))
        assert rows.position_B.tolist() == [0, 0]
        first = await runner.run(rows, None, 2)
        assert first.rows.position_B.tolist() == [2, 2] and first.needed_B.tolist() == [-1, -1]
        second = await runner.run(first.rows, SECONDS, None)
        assert torch.equal(second.rows.result().images_BCHW, segment.rows.result().images_BCHW)

    with_runners(tiny_run, placement, work)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_row_that_needs_another_expert_comes_back(tiny_run: Run, placement: str) -> None:
    """Where all experts are one runner, none does."""
    request = replace(OF_ONE, cluster_B=torch.tensor([0, 0]))

    async def work(runners: Runners) -> None:
        segment = await of_expert(runners, 1).run(rows_of(tiny_run, request), SECONDS, None)
        if placement == "colocated":
            assert segment.needed_B.tolist() == [-1, -1] and segment.rows.done_B.all()
        else:
            assert segment.needed_B.tolist() == [0, 0] and segment.needed_B.dtype == np.int64
            assert segment.rows.position_B.tolist() == [0, 0]
            segment = await of_expert(runners, 0).run(segment.rows, SECONDS, None)
        assert_equal(segment.rows.result().images_BCHW, right(tiny_run, request))

    with_runners(tiny_run, placement, work)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_mixing_runner_has_all_experts(tiny_run: Run, placement: str) -> None:
    request = replace(OF_ONE, settings=SamplingSettings(strategy="full", steps=5), cluster_B=None)

    async def work(runners: Runners) -> None:
        segment = await runners.mixing.run(rows_of(tiny_run, request), SECONDS, None)
        assert segment.needed_B.tolist() == [-1, -1]
        assert_equal(segment.rows.result().images_BCHW, right(tiny_run, request))
        assert runners.engine.num_velocities >= 5

    with_runners(tiny_run, placement, work)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_time_that_is_over_is_an_error(tiny_run: Run, placement: str) -> None:
    async def work(runners: Runners) -> None:
        with pytest.raises(DeadlineError, match="out of time"):
            await of_expert(runners, 1).run(rows_of(tiny_run, OF_ONE), 0.0, None)

    with_runners(tiny_run, placement, work)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_work_that_doesnt_fit_is_refused_at_once(tiny_run: Run, placement: str) -> None:
    long = replace(OF_ONE, settings=OF_ONE.settings.changed(steps=1000))

    async def work(runners: Runners) -> None:
        runner = of_expert(runners, 1)
        first = asyncio.ensure_future(runner.run(rows_of(tiny_run, long), SECONDS, None))
        await asyncio.sleep(0.05)
        with pytest.raises(OverloadedError):
            await runner.run(rows_of(tiny_run, long), 1e-4, None)
        first.cancel()

    with_runners(tiny_run, placement, work)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_rows_of_a_cancelled_call_leave(tiny_run: Run, placement: str) -> None:
    """So the next request isn't refused for their work."""
    long = replace(OF_ONE, settings=OF_ONE.settings.changed(steps=1000))

    async def work(runners: Runners) -> None:
        runner = of_expert(runners, 1)
        calls = [asyncio.ensure_future(runner.run(rows_of(tiny_run, long), SECONDS, None)) for _ in range(3)]
        await asyncio.sleep(0.05)
        for call in calls:
            call.cancel()
        segment = await runner.run(rows_of(tiny_run, OF_ONE), SECONDS, None)
        assert segment.rows.done_B.all()
        assert (await asyncio.gather(*calls, return_exceptions=True))[0].__class__ is asyncio.CancelledError
        await until(lambda: runners.engine.batch_rows == runners.engine.waiting_rows == 0)

    with_runners(tiny_run, placement, work)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_an_engine_that_is_closed_says_so(tiny_run: Run, placement: str) -> None:
    request = replace(OF_ONE, settings=SamplingSettings(strategy="full", steps=5), cluster_B=None)

    async def work(runners: Runners) -> None:
        runners.engine.require_running()
        await asyncio.to_thread(runners.engine.close)
        with pytest.raises(ServeError):
            runners.engine.require_running()
        with pytest.raises(ServeError, match="the server stops"):
            await runners.mixing.run(rows_of(tiny_run, request), SECONDS, None)

    with_runners(tiny_run, placement, work)
