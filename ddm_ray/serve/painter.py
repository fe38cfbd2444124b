"""Trajectories over Serve handles: the same generators that the in-process driver runs, answered by replicas.

Shapes: B images of one request, CHW image, S steps.
"""

import asyncio
from collections.abc import Generator, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import torch
from ray.exceptions import ObjectLostError, RayActorError
from ray.serve.exceptions import ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle
from torch import Tensor

from ddm_ray.core.routing import parse_strategy
from ddm_ray.sampling.request import Call, ExpertCall, MixtureInfo, SampleRequest
from ddm_ray.sampling.trajectory import Trajectories

T = TypeVar("T")

ATTEMPTS = 5
FIRST_WAIT_S = 0.1

GONE = (RayActorError, ObjectLostError, ReplicaUnavailableError)
"""What a call raises whose replica or node died under it: nothing is lost, as the call carries its state."""


class Painter:
    """Samples a mixture whose experts and router are deployments."""

    def __init__(self, info: MixtureInfo, experts: Sequence[DeploymentHandle[Any]], router: DeploymentHandle[Any]):
        self._info, self._experts, self._router = info, experts, router

    async def paint(self, request: SampleRequest) -> tuple[Tensor, Tensor]:
        """Images (B, C, H, W) and the heaviest expert per step and image (S, B).

        Raises SamplingError for a request that can't be met, NotFiniteError for a velocity that isn't finite, one
        of GONE if a part stays away in all tries.
        """
        if parse_strategy(request.strategy, self._info.num_experts).when == "start":
            return await self._paint_held(request)
        sampled = await self._run(Trajectories(request, self._info).run())
        return sampled.images_BCHW, sampled.experts_SB

    async def _paint_held(self, request: SampleRequest) -> tuple[Tensor, Tensor]:
        """One hop per chosen expert: the replica runs all steps."""
        expert_B = (await self._run(Trajectories(request, self._info).start())).experts_Bk[:, 0]
        chosen = expert_B.unique().tolist()
        rows = [torch.nonzero(expert_B == expert)[:, 0] for expert in chosen]
        painted = await asyncio.gather(
            *(
                _call(self._experts[expert].advance, advance_args(request.rows(row_R)))
                for expert, row_R in zip(chosen, rows, strict=True)
            )
        )
        images_BCHW = torch.cat(painted)[torch.cat(rows).argsort()]
        return images_BCHW, expert_B.expand(request.steps, -1)

    async def _run(self, generator: Generator[list[Call], list[Tensor], T]) -> T:
        results: list[Tensor] | None = None
        while True:
            try:
                calls = next(generator) if results is None else generator.send(results)
            except StopIteration as end:
                return end.value
            results = await asyncio.gather(*map(self._answer, calls))

    async def _answer(self, call: Call) -> Tensor:
        method = self._experts[call.expert].velocity if isinstance(call, ExpertCall) else self._router.logits
        assert isinstance(call.condition, Tensor)
        return await _call(method, call.x_BCHW.numpy(), call.t_B.numpy(), call.condition.numpy())


def advance_args(request: SampleRequest) -> dict[str, Any]:
    """The request in plain data, as `Expert.advance` takes it; which expert paints is settled."""
    assert isinstance(request.condition, Tensor)
    plain = {field.name: getattr(request, field.name) for field in fields(request)}
    del plain["strategy"], plain["cluster_B"]
    return plain | {"condition": request.condition.tolist()}


async def _call(method: DeploymentHandle[Any], *args: Any) -> Tensor:
    """The method's array as a tensor; where a replica died, from another one, or from the next to start."""
    for attempt in range(ATTEMPTS - 1):
        try:
            return torch.tensor(await method.remote(*args))
        except GONE:
            await asyncio.sleep(FIRST_WAIT_S * 2**attempt)
    return torch.tensor(await method.remote(*args))
