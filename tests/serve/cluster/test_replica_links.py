"""Links of an expert's replica, without Ray: its own velocities, for its weights, as long as they are asked for."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import torch

from ddm_ray.run.graph import expert
from ddm_ray.run.run import Run
from ddm_ray.sampling.request import ExpertCall
from ddm_ray.sampling.run_models import load_trained
from ddm_ray.sampling.serialization import pack_call
from ddm_ray.serve.cluster import expert_replica
from ddm_ray.serve.cluster.expert_replica import ExpertReplica
from ddm_ray.serve.cluster.velocities import Endpoint, VelocityClient
from ddm_ray.serve.engine.versions import Versions
from tests.serve.cluster.linked import HOST, Response, asked, exchanged, run, soon, until
from tests.serve.conftest import replica_of

CALL = ExpertCall(1, torch.randn(5, 1, 8, 8), torch.rand(5), torch.tensor([0, 3, 9, 10, 1]))


def with_replica(tiny_run: Run, work: Callable[[ExpertReplica], Awaitable[None]]) -> None:
    """Do this with a replica of expert 1, in its event loop."""

    async def done() -> None:
        await work(await replica_of(tiny_run, 1))

    run(done)


@pytest.fixture(autouse=True)
def on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_replica, "get_node_ip_address", lambda: HOST)


def test_over_a_link_comes_the_experts_own_velocity(tiny_run: Run) -> None:
    with torch.inference_mode():
        right = load_trained(tiny_run, expert(1))(CALL.x_BCHW, CALL.t_B, CALL.condition)

    async def work(replica: ExpertReplica) -> None:
        pair, endpoints = Versions(tiny_run).newest().pair(1), set[Endpoint]()

        async def link(client_key: bytes) -> AsyncIterator[Endpoint]:
            async for endpoint in replica.link(pair, client_key):
                endpoints.add(endpoint)
                yield endpoint

        for _ in range(2):
            client = VelocityClient("expert-001", lambda client_key: Response(link(client_key)))
            await asked(client, pack_call(CALL))
            answer = await asyncio.to_thread(client.answer, soon())
            assert answer is not None and torch.allclose(answer, right, atol=1e-6)
            assert await exchanged(client, b"no call of this mixture") is None
        assert len(endpoints) == 1

    with_replica(tiny_run, work)


def test_there_is_no_link_for_weights_that_are_not_at_hand(tiny_run: Run) -> None:
    async def work(replica: ExpertReplica) -> None:
        assert [endpoint async for endpoint in replica.link((None, None), bytes(40))] == []
        assert replica._velocities is None

    with_replica(tiny_run, work)


def test_a_link_that_is_cancelled_lets_nobody_in(tiny_run: Run) -> None:
    async def work(replica: ExpertReplica) -> None:
        pair = Versions(tiny_run).newest().pair(1)
        response = Response(replica.link(pair, bytes(40)))
        await anext(response)
        server = replica._velocities
        assert server is not None and list(server._answers) == [bytes(40)]
        response.cancel()
        await until(lambda: not server._answers)

    with_replica(tiny_run, work)
