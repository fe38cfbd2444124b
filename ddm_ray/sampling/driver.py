"""Trajectories in one process: each call is a call of a function.

Shapes: B rows, CHW image, K experts.
"""

from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from ddm_ray.config import SamplingSettings
from ddm_ray.core.condition import Condition, Text
from ddm_ray.core.solvers import Ask
from ddm_ray.errors import ExpertCountError, SamplingError
from ddm_ray.sampling.request import Call, ExpertCall, MixtureInfo, SampleRequest, SampleResult
from ddm_ray.sampling.trajectory import OnStep, Trajectories

Field = Callable[[Tensor, Tensor, Any], Tensor]
"""(x_BCHW, t_B, condition) -> velocity_BCHW, or logits_BK for a router."""


class Experts(Protocol):
    """The experts of a mixture by number; None for one that isn't there."""

    def __len__(self) -> int: ...

    def __getitem__(self, expert: int, /) -> Field | None: ...


T = TypeVar("T")
MAX_TEXTS = 64  # as many experts as may take turns
FULL = SamplingSettings(strategy="full")


def run(
    generator: Generator[list[Call], list[Tensor], T],
    experts: Experts,
    router: Field | None = None,
    device: torch.device | str = "cpu",
) -> T:
    """Answers every call of a `Trajectories` generator on `device`, one after the other, in inference mode.

    SamplingError if a router or an expert that is called isn't there.
    """
    prefetch: Callable[[int], None] | None = getattr(experts, "prefetch", None)
    moved = _Moved(device)
    with torch.inference_mode():
        results: list[Tensor] | None = None
        while True:
            try:
                calls = next(generator) if results is None else generator.send(results)
            except StopIteration as end:
                return end.value
            results = []
            for call, following in zip(calls, [*calls[1:], None], strict=True):
                for soon in (call, following):
                    # This one first: fetched after the next, it would be the next's turn to make room.
                    if prefetch and isinstance(soon, ExpertCall):
                        prefetch(soon.expert)
                results.append(_answer(call, experts, router, moved))


def sample(
    request: SampleRequest,
    info: MixtureInfo,
    experts: Experts,
    router: Field | None = None,
    device: torch.device | str = "cpu",
    on_step: OnStep | None = None,
) -> SampleResult:
    """Images by these experts; those that are None are left out and the mixture renormalises without them."""
    return run(Trajectories(request, with_available(info, experts)).run(on_step), experts, router, device)


def velocity(
    x_BCHW: Tensor,
    t: float,
    condition: Condition,
    info: MixtureInfo,
    experts: Experts,
    router: Field | None = None,
    device: torch.device | str = "cpu",
    *,
    settings: SamplingSettings = FULL,
    seeds: Sequence[int] | None = None,
    cluster_B: Tensor | None = None,
) -> Tensor:
    """The mixture's velocity at (x, t), t in [0, 1]: exact for exact networks by `full`, the default strategy.

    For strategies that draw, rows are images of the `seeds`, 0 to B - 1 if none are given. Raises TimeError, and as
    `sample` does.
    """
    request = SampleRequest(tuple(range(len(x_BCHW)) if seeds is None else seeds), condition, settings, cluster_B)
    info = with_available(info, experts)
    asked = Trajectories(request, info).answer(Ask(x_BCHW, t, new_step=True))
    return run(asked, experts, router, device).velocity_BCHW


def drawn_experts(
    request: SampleRequest, info: MixtureInfo, router: Field | None = None, device: torch.device | str = "cpu"
) -> tuple[Tensor, int]:
    """Int64 (B,): the experts that a strategy which chooses at the start gives the request's images; router rows."""
    trajectories = Trajectories(request, info)
    routing = run(trajectories.start(), [None] * info.num_experts, router, device)
    return routing.only_expert_B, trajectories.num_router_rows


def with_available(info: MixtureInfo, experts: Experts) -> MixtureInfo:
    """`info` without the experts that are None. ExpertCountError if there are not as many as it says."""
    if len(experts) != info.num_experts:
        raise ExpertCountError(f"{len(experts)} experts given for a mixture of {info.num_experts}: use None for a gap")
    present: Sequence[bool] = getattr(experts, "present", None) or [experts[k] is not None for k in range(len(experts))]
    available_K = torch.tensor(present)
    return info.with_available(available_K if info.available_K is None else available_K & info.available_K)


class _Moved:
    """Conditions on the device: texts are large, come again at every velocity, and are moved there once."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = device
        self._texts: OrderedDict[int, tuple[Text, Text]] = OrderedDict()

    def __call__(self, condition: Condition) -> Condition:
        if not isinstance(condition, Text) or torch.device(self.device).type == "cpu":
            return condition.to(self.device)
        original, copy = self._texts.pop(id(condition), (None, None))
        if copy is None or original is not condition:
            copy = condition.to(self.device)
        self._texts[id(condition)] = condition, copy
        if len(self._texts) > MAX_TEXTS:
            self._texts.popitem(last=False)
        return copy


def _answer(call: Call, experts: Experts, router: Field | None, moved: _Moved) -> Tensor:
    field = experts[call.expert] if isinstance(call, ExpertCall) else router
    if field is None:
        missing = f"expert {call.expert} is" if isinstance(call, ExpertCall) else "the router is"
        raise SamplingError(f"{missing} needed but not there: give it, or choose another strategy")
    return field(call.x_BCHW.to(moved.device), call.t_B.to(moved.device), moved(call.condition))
