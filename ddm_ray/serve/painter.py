"""Trajectories over Serve handles: the same generators that the in-process driver runs, answered by replicas.

Shapes: B images of one request, CHW image, S steps.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from ray.exceptions import ObjectLostError, RayActorError
from ray.serve.exceptions import ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle
from torch import Tensor

from ddm_ray.sampling.trajectory import (
    Call,
    ExpertCall,
    MixtureInfo,
    SampleRequest,
    trajectories,
)

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

        Raises SamplingError for a velocity that isn't finite, one of GONE if a part stays away in all tries.
        """
        if request.strategy == "once":
            return await self._paint_once(request)
        generator = trajectories(request, self._info)
        calls = next(generator)
        while True:
            results = await asyncio.gather(*map(self._answer, calls))
            try:
                calls = generator.send(results)
            except StopIteration as end:
                return end.value.images_BCHW, end.value.experts_SB

    async def _paint_once(self, request: SampleRequest) -> tuple[Tensor, Tensor]:
        """One hop per drawn expert: the replica runs all steps."""
        expert_B = torch.tensor([self._drawn(request, image) for image in range(len(request.seeds))])
        drawn = expert_B.unique().tolist()
        rows = [torch.nonzero(expert_B == expert)[:, 0] for expert in drawn]
        painted = await asyncio.gather(
            *(self._advance(expert, request, row_R) for expert, row_R in zip(drawn, rows, strict=True))
        )
        images_BCHW = torch.cat(painted)[torch.cat(rows).argsort()]
        return images_BCHW, expert_B.expand(request.steps, -1)

    def _drawn(self, request: SampleRequest, image: int) -> int:
        seed, label_B = request.seeds[image], request.label_B[image : image + 1]
        (call,) = next(trajectories(replace(request, seeds=(seed,), label_B=label_B), self._info))
        assert isinstance(call, ExpertCall)
        return call.expert

    async def _advance(self, expert: int, request: SampleRequest, row_R: Tensor) -> Tensor:
        seeds = [request.seeds[row] for row in row_R.tolist()]
        labels = request.label_B[row_R].tolist()
        return await _call(
            self._experts[expert].advance,
            seeds,
            labels,
            request.steps,
            request.guidance_scale,
            request.solver,
        )

    async def _answer(self, call: Call) -> Tensor:
        method = self._experts[call.expert].velocity if isinstance(call, ExpertCall) else self._router.logits
        return await _call(method, call.x_BCHW.numpy(), call.t_B.numpy(), call.label_B.numpy())


async def _call(method: DeploymentHandle[Any], *args: Any) -> Tensor:
    """The method's array as a tensor; where a replica died, from another one, or from the next to start."""
    for attempt in range(ATTEMPTS - 1):
        try:
            return torch.tensor(await method.remote(*args))
        except GONE:
            await asyncio.sleep(FIRST_WAIT_S * 2**attempt)
    return torch.tensor(await method.remote(*args))
