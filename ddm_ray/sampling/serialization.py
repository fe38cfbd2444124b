"""Trajectories and calls as bytes, for another process: safetensors, and the settings of their plans as JSON."""

import json
from dataclasses import replace
from typing import Annotated

import numpy as np
import torch
from pydantic import BaseModel, Field, StrictBool, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from ddm_ray.config import SamplingSettings
from ddm_ray.core.condition import Condition, Text
from ddm_ray.core.solver_schedule import HISTORY
from ddm_ray.core.solvers import SOLVERS
from ddm_ray.errors import SamplingError
from ddm_ray.sampling.plan import AT_VELOCITY, Plans, SamplingPlan
from ddm_ray.sampling.request import ExpertCall, MixtureInfo, SampleRequest, validate
from ddm_ray.sampling.state import Trajectories
from ddm_ray.spelling import one_line

NUMBERS = ("plan", "seed", "position", "usable", "expert_rows", "router_rows")
TEXT = ("tokens_BLE", "mask_BL", "pooled_BP")


def pack(state: Trajectories) -> bytes:
    """All rows as they are between two velocities; what a turn has made out since is made out again."""
    plans = [
        {
            "settings": plan.settings.model_dump(mode="json"),
            "available": None if plan.rule.available_K is None else plan.rule.available_K.tolist(),
        }
        for plan in state.plans
    ]
    # The process that goes on may have no text encoder.
    null = _tensors(state.null) if isinstance(state.null, Text) else {}
    tensors = {
        "plans": torch.frombuffer(bytearray(json.dumps(plans).encode()), dtype=torch.uint8),
        "x": state.x_BCHW,
        "history": torch.stack(state.history, dim=1),
        "weights": state.weights_BK,
        "routing": state.routing_BSK[:, : max(plan.settings.steps for plan in state.plans)],
        **{name: torch.from_numpy(array.view(np.int64)) for name, array in _numbers(state).items()},
        **_tensors(state.condition),
        **{f"null_{name}": part for name, part in null.items()},
    }
    return save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()})


def unpack(data: bytes, info: MixtureInfo, device: torch.device | str = "cpu") -> Trajectories:
    """The rows that `pack` packed, of this mixture; `trajectory.turned` sets them going.

    SamplingError for bytes that aren't such rows.
    """
    try:
        tensors = load(data)
        described = _Plans.validate_json(tensors.pop("plans").numpy().tobytes())
        return _unpacked(tensors, described, info, device)
    except (SafetensorError, ValidationError, KeyError, IndexError, ValueError, TypeError, AssertionError) as error:
        raise SamplingError(f"these bytes are no trajectories of this mixture: {one_line(error):.200}") from None


def pack_call(call: ExpertCall) -> bytes:
    """A call of an expert, without its number."""
    tensors = {"x": call.x_BCHW, "t": call.t_B, **_tensors(call.condition)}
    return save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()})


def unpack_call(data: bytes, expert: int, info: MixtureInfo, device: torch.device | str = "cpu") -> ExpertCall:
    """The call that `pack_call` packed, of this expert of a mixture. SamplingError for bytes that aren't one."""
    try:
        tensors = load(data)
        x_BCHW, t_B, condition = tensors["x"], tensors["t"], _condition(tensors)
        _require(x_BCHW.shape[1:] == info.image_shape, f"x has shape {tuple(x_BCHW.shape)}")
        _require(t_B.shape == x_BCHW.shape[:1] and len(condition) == len(x_BCHW) > 0, "not one t and condition a row")
        _require(x_BCHW.dtype == t_B.dtype == info.dtype, f"x and t are {x_BCHW.dtype} and {t_B.dtype}")
        return ExpertCall(expert, x_BCHW.to(device), t_B.to(device), condition.to(device))
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise SamplingError(f"these bytes are no call of this mixture: {one_line(error):.200}") from None


def pack_velocity(velocity_BCHW: Tensor) -> bytes:
    """The answer to a call of an expert, as float32."""
    return save({"velocity": velocity_BCHW.float().cpu().contiguous()})


def unpack_velocity(data: bytes) -> Tensor:
    """The answer that `pack_velocity` packed."""
    return load(data)["velocity"]


class _PackedPlan(BaseModel):
    settings: SamplingSettings
    available: list[StrictBool] | None


_Plans = TypeAdapter(Annotated[list[_PackedPlan], Field(min_length=1)])


def _unpacked(
    tensors: dict[str, Tensor], described: list[_PackedPlan], info: MixtureInfo, device: torch.device | str
) -> Trajectories:
    numbers = {name: tensors[name].numpy() for name in NUMBERS}
    x_BCHW, history_BNCHW, weights_BK, routing_BSK = (tensors[name] for name in ("x", "history", "weights", "routing"))
    count, num_steps = len(x_BCHW), max(plan.settings.steps for plan in described)
    rows, history = (count, info.num_experts), max(1, *(SOLVERS[plan.settings.solver].history for plan in described))
    _require(count > 0, "no rows")
    _require(len(described) <= count, "more plans than rows")
    for name, shape in {
        "x": (count, *info.image_shape),
        "history": (count, history, *info.image_shape),
        "weights": rows,
        # As many steps as the longest plan has, so that a request for many has sent as much.
        "routing": (count, num_steps, info.num_experts),
    }.items():
        _require(tuple(tensors[name].shape) == shape, f"{name} has shape {tuple(tensors[name].shape)}, not {shape}")
        _require(tensors[name].dtype == info.dtype, f"{name} is {tensors[name].dtype}, not {info.dtype}")
        _require(bool(tensors[name].isfinite().all()), f"{name} isn't finite")
    for name, array in numbers.items():
        _require(array.shape == (count,) and array.dtype == np.int64, f"{name} isn't one int64 a row")
        _require(name == "seed" or bool((array >= 0).all()), f"{name} is negative")
    total_B = weights_BK.sum(dim=1)
    held = (weights_BK >= 0).all() and ((total_B == 0) | ((total_B - 1).abs() < 1e-3)).all()
    _require(bool(held), "weights of a row don't sum to 1")
    condition = _condition(tensors)
    if isinstance(condition, Text) and f"null_{TEXT[0]}" in tensors:
        null = _condition({name.removeprefix("null_"): part for name, part in tensors.items() if "null_" in name})
        assert isinstance(null, Text)
        info = replace(info, null_text=null)
    _require(int(numbers["plan"].max()) < len(described), "a row has no plan")
    plans = []
    for number, plan in enumerate(described):
        own = np.flatnonzero(numbers["plan"] == number)
        _require(len(own) > 0, "a plan has no rows")
        seeds = tuple(int(seed) for seed in numbers["seed"].view(np.uint64)[own])
        experts_B = weights_BK[own].argmax(dim=1)
        request = SampleRequest(seeds, condition[torch.from_numpy(own)], plan.settings, experts_B)
        available_K = None if plan.available is None else torch.tensor(plan.available)
        own_info = info if available_K is None else info.with_available(available_K)
        validate(request, own_info)
        plans.append(SamplingPlan.of(plan.settings, own_info))
    state = Trajectories(
        info=info,
        plans=Plans(plans),
        plan_B=numbers["plan"],
        seed_B=numbers["seed"].view(np.uint64),
        position_B=numbers["position"],
        usable_B=numbers["usable"],
        condition=condition.to(device),
        null=info.null(1).to(device) if any(plan.settings.guidance_scale != 1 for plan in plans) else None,
        x_BCHW=x_BCHW.to(device),
        history=history_BNCHW.to(device).unbind(1),
        weights_BK=weights_BK,
        routing_BSK=routing_BSK.to(device),
        expert_rows_B=numbers["expert_rows"],
        router_rows_B=numbers["router_rows"],
    )
    over_B = state.position_B > state.plans.lengths[state.plan_B]
    _require(not over_B.any(), "a row is beyond the end of its plan")
    _require(int(state.usable_B.max()) <= HISTORY, "a row may use more velocities than there are")
    going = ~state.done_B & (state.position_B > 0) & (state.plans.when != AT_VELOCITY)[state.plan_B]
    _require(bool((total_B.numpy()[going] > 0).all()), "a row on its way holds no expert")
    return state


def _require(condition: bool, finding: str) -> None:
    if not condition:
        raise ValueError(finding)


def _numbers(state: Trajectories) -> dict[str, np.ndarray]:
    arrays = (state.plan_B, state.seed_B, state.position_B, state.usable_B, state.expert_rows_B, state.router_rows_B)
    return dict(zip(NUMBERS, arrays, strict=True))


def _condition(tensors: dict[str, Tensor]) -> Condition:
    return tensors["label"] if "label" in tensors else Text(*(tensors[name] for name in TEXT if name in tensors))


def _tensors(condition: Condition) -> dict[str, Tensor]:
    if not isinstance(condition, Text):
        return {"label": condition}
    parts = (condition.tokens_BLE, condition.mask_BL, condition.pooled_BP)
    return {name: part for name, part in zip(TEXT, parts, strict=True) if part is not None}
