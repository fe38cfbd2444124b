"""Trajectories over Serve handles: moved as the in-process driver moves them, their calls answered by replicas."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from ray.exceptions import ObjectLostError, RayActorError
from ray.serve.exceptions import ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle
from torch import Tensor

from ddm_ray.sampling.batches import by_expert, joined
from ddm_ray.sampling.driver import chosen_expert_B
from ddm_ray.sampling.request import Call, ExpertCall, MixtureInfo, SampleRequest, SampleResult
from ddm_ray.sampling.state import Trajectories
from ddm_ray.sampling.trajectory import advance, needs, start

ATTEMPTS = 5
FIRST_WAIT_S = 0.1

GONE = (RayActorError, ObjectLostError, ReplicaUnavailableError)
"""Errors of a call whose replica or node died: the call carries its state, so another replica can repeat it."""


class RemoteSampler:
    """Samples a mixture whose experts and router are deployments."""

    def __init__(self, info: MixtureInfo, experts: Sequence[DeploymentHandle[Any]], router: DeploymentHandle[Any]):
        self._info, self._experts, self._router = info, experts, router

    async def sample(self, request: SampleRequest) -> SampleResult:
        """The request's images, as `Models.sample` gives them; one call per expert where experts are held.

        Raises SamplingError for a request that can't be met, NotFiniteError for a velocity that isn't finite, one
        of GONE if a replica stays away in all tries.
        """
        state = start(request, self._info)
        if request.strategy(self._info.num_experts).when != "start":
            while not state.done_B.any():
                state = await self._advanced(state)
            return state.result()
        assert state.turn is not None
        num_router_rows = len(state.turn.asks_R)
        if num_router_rows:
            state = await self._advanced(state)
        requests, order = by_expert(request, chosen_expert_B(state))
        calls = [_call(self._experts[expert].sample, part) for expert, part in requests.items()]
        return replace(joined(await asyncio.gather(*calls), order), num_router_rows=num_router_rows)

    async def _advanced(self, state: Trajectories) -> Trajectories:
        return advance(state, await asyncio.gather(*map(self._answer, needs(state))))

    async def _answer(self, call: Call) -> Tensor:
        method = self._experts[call.expert].velocity if isinstance(call, ExpertCall) else self._router.logits
        assert isinstance(call.condition, Tensor)
        return torch.tensor(await _call(method, call.x_BCHW.numpy(), call.t_B.numpy(), call.condition.numpy()))


async def _call(method: DeploymentHandle[Any], *args: Any) -> Any:
    """Call the method; if its replica dies, call it again on another, or on the next to start."""
    for attempt in range(ATTEMPTS - 1):
        try:
            return await method.remote(*args)
        except GONE:
            await asyncio.sleep(FIRST_WAIT_S * 2**attempt)
    return await method.remote(*args)
