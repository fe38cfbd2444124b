"""Experts that are adapters of one base: rows of different experts are one call of the base.

Shapes: R rows of all calls.
"""

from collections.abc import Sequence
from threading import Lock

import numpy as np
import torch
from torch import Tensor, nn

from ddm_ray.core.condition import join
from ddm_ray.core.flow import Flow
from ddm_ray.core.snr import VelocityField, bare, velocity_field
from ddm_ray.core.transfer import upload
from ddm_ray.models.mixed_adapters import MixedAdapters
from ddm_ray.models.weights import share_tensors
from ddm_ray.sampling.driver import Experts
from ddm_ray.sampling.request import ExpertCall

ROWS_AT_ONCE = 64
"""Rows of a shared call at most. A call of one expert that has as many gains nothing from others."""


class SharedBase:
    """The experts of a mixture as adapters of one base, None for those that aren't there. Threads call it in turn."""

    def __init__(self, experts: Sequence[nn.Module | None]):
        """`experts`: as sampling calls them, adapted alike and of one base; one at least is there."""
        self._experts, self._lock = list(experts), Lock()
        self._share()

    def _share(self) -> None:
        networks = {number: bare(each) for number, each in enumerate(self._experts) if each is not None}
        self._place = {number: place for place, number in enumerate(networks)}
        self._mixed = MixedAdapters([*networks.values()])
        first = self._experts[next(iter(networks))]
        self._field = velocity_field(self._mixed, first.flow if isinstance(first, VelocityField) else Flow())

    def __len__(self) -> int:
        return len(self._experts)

    def __getitem__(self, expert: int) -> nn.Module | None:
        return self._experts[expert]

    def to(self, device: str | None, dtype: torch.dtype | None) -> None:
        """Move the base and all adapters, as torch's modules are moved; None: stay."""
        with self._lock:
            adapted = [each for each in self._experts if each is not None]
            base = bare(adapted[0]).base
            base.to(device, dtype)
            for expert in adapted:
                share_tensors(base, bare(expert))
                expert.to(device, dtype)
            self._share()

    def together(self, calls: Sequence[ExpertCall]) -> list[Tensor]:
        """Answers to calls of experts that are there, by few calls of the base: each row has its expert's adapter."""
        small = [call for call in calls if len(call.x_BCHW) < ROWS_AT_ONCE]
        of_small = iter(self._joined(small) if small else ())
        return [next(of_small) if len(call.x_BCHW) < ROWS_AT_ONCE else self._alone(call) for call in calls]

    def _alone(self, call: ExpertCall) -> Tensor:
        field = self._experts[call.expert]
        assert field is not None
        answer: Tensor = field(call.x_BCHW, call.t_B, call.condition)
        return answer

    def _joined(self, calls: Sequence[ExpertCall]) -> list[Tensor]:
        sizes = [len(call.x_BCHW) for call in calls]
        x_RCHW, t_R = torch.cat([call.x_BCHW for call in calls]), torch.cat([call.t_B for call in calls])
        adapter_R = upload(np.repeat([self._place[call.expert] for call in calls], sizes), x_RCHW.device)
        condition, answers = join([call.condition for call in calls]), list[Tensor]()
        with self._lock:
            for first in range(0, len(x_RCHW), ROWS_AT_ONCE):
                rows = slice(first, first + ROWS_AT_ONCE)
                self._mixed.choose(adapter_R[rows])
                answers.append(self._field(x_RCHW[rows], t_R[rows], condition[rows]))
        return list(torch.cat(answers).split(sizes))


def sharing(experts: Experts) -> Experts:
    """The experts, which share calls of their base if all are adapters of one; else as they are."""
    fields = [experts[number] for number in range(len(experts))]
    present = [each for each in fields if each is not None]
    bases = {id(base) if (base := getattr(bare(each), "base", None)) is not None else None for each in present}
    if len(bases) != 1 or None in bases:
        return experts
    return SharedBase(fields)  # type: ignore[arg-type]
