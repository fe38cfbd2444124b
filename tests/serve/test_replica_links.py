"""Links of an expert's replica, without Ray: its own velocities, for its weights, as long as they are asked for."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import torch
from safetensors.torch import load

from ddm_ray.sampling.packing import pack_call
from ddm_ray.sampling.request import ExpertCall
from ddm_ray.sampling.run_models import load_model
from ddm_ray.serve import deployments
from ddm_ray.serve.computing import Computing
from ddm_ray.serve.deployments import ExpertReplica
from ddm_ray.serve.velocities import Address, NoAnswerError, VelocityLink
from ddm_ray.serve.versions import Versions
from ddm_ray.storage.graph import expert
from ddm_ray.storage.run import Run

PATIENCE_S = 30.0
CALL = ExpertCall(1, torch.randn(5, 1, 8, 8), torch.rand(5), torch.tensor([0, 3, 9, 10, 1]))


def with_replica(run: Run, work: Callable[[ExpertReplica], Awaitable[None]]) -> None:
    """Do this with a replica of expert 1, in its event loop."""

    async def done() -> None:
        replica = ExpertReplica.__new__(ExpertReplica)
        await replica.__init__(run.url, 1, Computing(max_rows=8))  # type: ignore[misc]  # as Serve does
        try:
            await work(replica)
        finally:
            if replica._velocities is not None:
                await (await replica._velocities).close()

    asyncio.run(asyncio.wait_for(done(), 2 * PATIENCE_S))


def test_over_a_link_comes_the_experts_own_velocity(tiny_run: Run) -> None:
    with torch.inference_mode():
        right = load_model(tiny_run, expert(1))(CALL.x_BCHW, CALL.t_B, CALL.condition)

    async def work(replica: ExpertReplica) -> None:
        pair = Versions(tiny_run).newest().pair(1)
        streams = [replica.link(pair) for _ in range(2)]
        addresses: list[Address] = [await anext(stream) for stream in streams]
        assert addresses[0].port == addresses[1].port and addresses[0].token != addresses[1].token
        for address in addresses:
            link = VelocityLink(address)
            answer = await link.ask(pack_call(CALL), PATIENCE_S)
            assert torch.allclose(load(answer)["velocity"], right, atol=1e-6)
            with pytest.raises(NoAnswerError, match="ABORTED"):
                await link.ask(b"no call of this mixture", PATIENCE_S)
            await link.close()
        for stream in streams:
            await stream.aclose()

    with_replica(tiny_run, work)


def test_there_is_no_link_for_weights_that_are_not_at_hand(tiny_run: Run) -> None:
    async def work(replica: ExpertReplica) -> None:
        assert [address async for address in replica.link((None, None))] == []
        assert replica._velocities is None

    with_replica(tiny_run, work)


@pytest.mark.parametrize("ends", ["nobody asks", "it is cancelled"])
def test_a_link_that_ends_lets_nobody_in(tiny_run: Run, ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So an expert that nobody asks any more can be scaled to zero."""

    async def work(replica: ExpertReplica) -> None:
        stream = replica.link(Versions(tiny_run).newest().pair(1))
        link = VelocityLink(await anext(stream))
        assert await link.ask(pack_call(CALL), PATIENCE_S)
        ending = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        if ends == "it is cancelled":
            ending.cancel()
        with pytest.raises((StopAsyncIteration, asyncio.CancelledError)):
            await ending
        with pytest.raises(NoAnswerError, match="UNIMPLEMENTED"):
            await link.ask(pack_call(CALL), PATIENCE_S)
        await link.close()

    if ends == "nobody asks":
        monkeypatch.setattr(deployments, "IDLE_S", 0.2)
    with_replica(tiny_run, work)
