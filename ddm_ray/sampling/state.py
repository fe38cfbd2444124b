"""The state of trajectories, as data: images on their way from noise, one row each.

Rows may be anywhere: each has a plan, and a position in it. Nothing here knows how they move; `trajectory` does.
Shapes: B rows, R some of them by number, CHW image, K experts, P plans, S steps, N velocities, E entries of one
velocity: the rows, and after them once more, without their condition, those that are guided.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddm_ray.core.condition import Condition, join
from ddm_ray.core.mixture import ExpertRows
from ddm_ray.core.solver_schedule import moved
from ddm_ray.core.transfer import each, sent, upload
from ddm_ray.errors import NotFiniteError
from ddm_ray.sampling.noise import step_noise
from ddm_ray.sampling.plan import Plans
from ddm_ray.sampling.request import MixtureInfo, RouterCall, SampleResult


@dataclass(frozen=True, eq=False)
class Layout:
    """Entries that each expert computes, and their conditions; it stays for as long as they do."""

    guided_B: np.ndarray
    null_B: np.ndarray
    used_EK: np.ndarray
    condition_E: Condition
    guided_G: Tensor | None
    groups: list[ExpertRows]
    conditions: list[Condition]
    experts_B: np.ndarray
    """Rows of experts that each row pays for."""
    single: bool
    """True if each entry is one expert's, with weight 1."""


@dataclass(frozen=True, eq=False)
class Chosen:
    """The experts of a turn: weights that rows hold (CPU), and `weights_EK` of all entries, on the state's device.

    `restarts_B`: rows where history restarts.
    """

    held_BK: Tensor
    weights_EK: Tensor
    restarts_B: np.ndarray
    layout: Layout


@dataclass(frozen=True, eq=False)
class Turn:
    """The next velocity of each row. `planned`: its records, (B,) of PLANNED, or one for all rows.

    `routed_R`: numbers of the rows for which the router is called, by `router_call`; `twice_R` of those where the
    branches are mixed each under its own posterior, for which it is called after these.
    """

    planned: np.ndarray
    point_BCHW: Tensor
    routed_R: np.ndarray
    twice_R: np.ndarray
    router_call: RouterCall | None = None
    chosen: Chosen | None = None

    def changed(self, **others: Any) -> "Turn":
        """The same turn with its call of the router or its experts; what was made out of it stays."""
        after = object.__new__(Turn)
        after.__dict__.update(self.__dict__, **others)
        return after

    @cached_property
    def t_B(self) -> Tensor:
        """Times at which the rows are, beside their points."""
        t = each(self.planned["t"], self.point_BCHW)
        return t if isinstance(t, Tensor) else self.point_BCHW.new_full((len(self.point_BCHW),), t)


@dataclass(frozen=True, eq=False)
class RouterCondition:
    """The condition of the last call of the router: texts are large, and mostly the same again."""

    entries_R: np.ndarray
    null_R: np.ndarray
    condition_R: Condition


@dataclass(frozen=True, eq=False)
class Trajectories:
    """Images on their way. `x_BCHW` at the start of each row's step, and the velocities before, on one device.

    `history`: these velocities (B, C, H, W), the latest first, as many as any row's solver uses; `usable_B`: how many
    each row may use, those since its history restarted. `position_B`: velocities that each row has had, of its plan's.
    `weights_BK` (CPU): weights of the experts that it holds, 0 until they are chosen. `routing_BSK`: those of each step
    so far; it is written in place, so that a repeated advance writes the same again. `condition` has B rows, `null` one
    (None where no plan needs it).
    """

    info: MixtureInfo
    plans: Plans
    plan_B: np.ndarray
    seed_B: np.ndarray
    position_B: np.ndarray
    condition: Condition
    null: Condition | None
    usable_B: np.ndarray
    x_BCHW: Tensor
    history: tuple[Tensor, ...]
    weights_BK: Tensor
    routing_BSK: Tensor
    expert_rows_B: np.ndarray
    router_rows_B: np.ndarray
    turn: Turn | None = None
    layout: Layout | None = None
    router_condition: RouterCondition | None = None

    def __len__(self) -> int:
        return len(self.plan_B)

    def changed(self, **others: Any) -> "Trajectories":
        """The same rows with other values of these fields."""
        # As dataclasses.replace does, in a tenth of its time: it is twice a velocity.
        after = object.__new__(Trajectories)
        after.__dict__.update(self.__dict__, **others)
        return after

    @property
    def done_B(self) -> np.ndarray:
        """Bool: rows that have had all their velocities; their x is the image."""
        return np.asarray(self.position_B >= self.plans.lengths[self.plan_B])

    def planned(self) -> np.ndarray:
        """The next velocity of each row, (B,) of PLANNED; (1,) where all rows have the same."""
        number_B = self.plans.begins[self.plan_B] + self.position_B
        first = number_B[0]
        if (number_B == first).all():
            return self.plans.velocities[first : first + 1]
        return self.plans.velocities.take(number_B)

    def step_noise(self, rows: np.ndarray, step_R: np.ndarray) -> Tensor:
        """Standard normal noise (R, C, H, W) of a step of some rows, the same in any batch and at any time."""
        seeds = [int(seed) for seed in self.seed_B[rows]]
        return sent(step_noise(seeds, step_R.tolist(), self.info.image_shape), self.x_BCHW.device).to(self.x_BCHW)

    def conditions(self, rows: np.ndarray, null: np.ndarray) -> Condition:
        """The conditions of some rows (by number), the null one where `null` (bool)."""
        device = self.x_BCHW.device
        if not null.any():
            same = len(rows) == len(self) and np.array_equal(rows, np.arange(len(self)))
            return self.condition if same else self.condition[upload(rows, device)]
        assert self.null is not None
        return join([self.condition, self.null])[upload(np.where(null, len(self), rows), device)]

    def rows(self, rows: np.ndarray) -> "Trajectories":
        """Some of the rows, by number or by bool; they go on as they would have among the others."""
        index_R = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows
        plans, plan_R = self.plans, self.plan_B[index_R]
        used_P = np.zeros(len(plans), bool)
        used_P[plan_R] = True
        if not used_P.all():
            plans = Plans(plan for plan, used in zip(plans, used_P, strict=True) if used)
            plan_R = (used_P.cumsum() - 1)[plan_R]
        host_R, device_R = torch.from_numpy(index_R), upload(index_R, self.x_BCHW.device)
        return self.changed(
            plans=plans,
            plan_B=plan_R,
            seed_B=self.seed_B[index_R],
            position_B=self.position_B[index_R],
            condition=self.condition[device_R],
            x_BCHW=self.x_BCHW[device_R],
            usable_B=self.usable_B[index_R],
            history=tuple(past_BCHW[device_R] for past_BCHW in self.history[: plans.history]),
            weights_BK=self.weights_BK[host_R],
            routing_BSK=self.routing_BSK[device_R],
            expert_rows_B=self.expert_rows_B[index_R],
            router_rows_B=self.router_rows_B[index_R],
            turn=None,
            layout=None,
            router_condition=None,
        )

    @classmethod
    def joined(cls, parts: Sequence["Trajectories"]) -> "Trajectories":
        """The rows of all parts, in order: of one mixture, on one device, each wherever it is."""
        plans = Plans({plan.key: plan for part in parts for plan in part.plans}.values())
        number = {plan.key: n for n, plan in enumerate(plans)}
        num_steps = max(part.routing_BSK.shape[1] for part in parts)

        def padded(routing_BSK: Tensor) -> Tensor:
            more = num_steps - routing_BSK.shape[1]
            return torch.nn.functional.pad(routing_BSK, (0, 0, 0, more)) if more else routing_BSK

        def past(part: Trajectories, number: int) -> Tensor:
            return part.history[number] if number < len(part.history) else torch.zeros_like(part.x_BCHW)

        return cls(
            info=parts[0].info,
            plans=plans,
            plan_B=np.concatenate([np.array([number[plan.key] for plan in part.plans])[part.plan_B] for part in parts]),
            seed_B=np.concatenate([part.seed_B for part in parts]),
            position_B=np.concatenate([part.position_B for part in parts]),
            condition=join([part.condition for part in parts]),
            null=next((part.null for part in parts if part.null is not None), None),
            x_BCHW=torch.cat([part.x_BCHW for part in parts]),
            usable_B=np.concatenate([part.usable_B for part in parts]),
            history=tuple(torch.cat([past(part, number) for part in parts]) for number in range(plans.history)),
            weights_BK=torch.cat([part.weights_BK for part in parts]),
            routing_BSK=torch.cat([padded(part.routing_BSK) for part in parts]),
            expert_rows_B=np.concatenate([part.expert_rows_B for part in parts]),
            router_rows_B=np.concatenate([part.router_rows_B for part in parts]),
        )

    def foreseen(self) -> SampleResult:
        """The result that the last velocities point at, x - t v of the linear path, with the routing of steps so far.

        For rows of one plan that have just ended the same step. A step that drew noise z made x of data and noise as
        keep (x - t v) + (t - 1 + keep) v + noise z: see `core.solvers.ancestral`.
        """
        last = self.plans[0].velocities[self.position_B[0] - 1]
        images_BCHW = moved(self.x_BCHW, self.history[:1], [float(1 - last["keep"] - last["until"])])
        if last["noise"]:
            drawn_BCHW = self.step_noise(np.arange(len(self)), np.full(len(self), last["step"]))
            images_BCHW = moved(images_BCHW, [drawn_BCHW], [-float(last["noise"])]) / float(last["keep"])
        return self._as_result(images_BCHW, int(last["step"]) + 1)

    def result(self) -> SampleResult:
        """The images of rows of one plan, on the CPU. NotFiniteError if one isn't finite."""
        (plan,) = self.plans
        require_finite_result(self.x_BCHW)
        return self._as_result(self.x_BCHW, int(plan.velocities["step"][-1]) + 1)

    def _as_result(self, images_BCHW: Tensor, num_steps: int) -> SampleResult:
        return SampleResult(
            images_BCHW.cpu(),
            self.routing_BSK[:, :num_steps].transpose(0, 1).contiguous().cpu(),
            int(self.expert_rows_B.sum()),
            int(self.router_rows_B.sum()),
            self.info.clusters,
        )


def require_finite_result(result_BCHW: Tensor) -> None:
    """Raise NotFiniteError for what came out of a GPU, where nothing looks at each velocity."""
    if not result_BCHW.is_cpu and not result_BCHW.isfinite().all():
        raise NotFiniteError("an expert or the router gave what isn't finite; on a CPU it is named")
