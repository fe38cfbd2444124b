"""Trajectories in one process: each call is a call of a function."""

from collections.abc import Callable, Generator, Sequence

import torch
from torch import Tensor

from ddm_ray.errors import SamplingError
from ddm_ray.sampling.trajectory import (
    Call,
    ExpertCall,
    MixtureInfo,
    Sampled,
    SampleRequest,
    trajectories,
)

Field = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(x_BCHW, t_B, label_B) -> velocity_BCHW, or logits_BK for a router."""


def run(
    generator: Generator[list[Call], list[Tensor], Sampled],
    experts: Sequence[Field | None],
    router: Field | None = None,
    device: torch.device | str = "cpu",
) -> Sampled:
    """Answers every call of `trajectories(...)` on `device`, one after the other, in inference mode.

    SamplingError if a router or an expert that is called isn't there.
    """
    with torch.inference_mode():
        results: list[Tensor] | None = None
        while True:
            try:
                calls = next(generator) if results is None else generator.send(results)
            except StopIteration as end:
                return end.value
            results = [_answer(call, experts, router, device) for call in calls]


def sample(
    request: SampleRequest,
    info: MixtureInfo,
    experts: Sequence[Field | None],
    router: Field | None = None,
    device: torch.device | str = "cpu",
) -> Sampled:
    """Images by these experts; those that are None are left out and the mixture renormalises without them."""
    if len(experts) != info.num_experts:
        raise SamplingError(f"{len(experts)} experts given for a mixture of {info.num_experts}: use None for a gap")
    alive_K = torch.tensor([expert is not None for expert in experts])
    if info.alive_K is not None:
        alive_K &= info.alive_K
    return run(trajectories(request, info.with_alive(alive_K)), experts, router, device)


def _answer(call: Call, experts: Sequence[Field | None], router: Field | None, device: torch.device | str) -> Tensor:
    field = experts[call.expert] if isinstance(call, ExpertCall) else router
    if field is None:
        missing = f"expert {call.expert} is" if isinstance(call, ExpertCall) else "the router is"
        raise SamplingError(f"{missing} needed but not there: give it, or choose strategy once or other experts")
    return field(call.x_BCHW.to(device), call.t_B.to(device), call.label_B.to(device))
