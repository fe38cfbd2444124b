"""Trajectories as bytes, which another process goes on from: safetensors, and the settings of their plans as JSON."""

import json

import numpy as np
import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from ddm_ray.config import SamplingSettings
from ddm_ray.core.condition import Condition, Text
from ddm_ray.errors import SamplingError
from ddm_ray.sampling.plan import Plans, SamplingPlan
from ddm_ray.sampling.request import MixtureInfo
from ddm_ray.sampling.state import Trajectories

TEXT = ("tokens_BLE", "mask_BL", "pooled_BP")


def pack(state: Trajectories) -> bytes:
    """The rows, between two velocities."""
    plans = [
        {
            "settings": plan.settings.model_dump(mode="json"),
            "available": None if plan.rule.available_K is None else plan.rule.available_K.tolist(),
        }
        for plan in state.plans
    ]
    tensors = {
        "plans": torch.frombuffer(bytearray(json.dumps(plans).encode()), dtype=torch.uint8),
        "x": state.x_BCHW,
        "last": state.last_BCHW,
        "weights": state.weights_BK,
        "routing": state.routing_BSK,
        **{name: torch.from_numpy(array.view(np.int64)) for name, array in _numbers(state).items()},
        **_tensors(state.condition),
    }
    return save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()})


def unpack(data: bytes, info: MixtureInfo, device: torch.device | str = "cpu") -> Trajectories:
    """The rows that `pack` packed, of this mixture; `trajectory.turned` sets them going.

    SamplingError for bytes that aren't such rows.
    """
    try:
        return _unpacked(load(data), info, device)
    except (SafetensorError, ValidationError, KeyError, ValueError, TypeError, AssertionError) as error:
        raise SamplingError(f"these bytes are no trajectories of this mixture: {type(error).__name__}") from None


def _unpacked(tensors: dict[str, Tensor], info: MixtureInfo, device: torch.device | str) -> Trajectories:
    plans = Plans(
        SamplingPlan.of(
            SamplingSettings.model_validate(plan["settings"]),
            info if plan["available"] is None else info.with_available(torch.tensor(plan["available"])),
        )
        for plan in json.loads(tensors.pop("plans").numpy().tobytes())
    )
    numbers = {name: tensors.pop(name).numpy() for name in ("plan", "seed", "position", "expert_rows", "router_rows")}
    x_BCHW, last_BCHW, routing_BSK = (tensors.pop(name).to(device) for name in ("x", "last", "routing"))
    weights_BK, count, num_experts = tensors.pop("weights"), len(numbers["plan"]), info.num_experts
    assert x_BCHW.shape == last_BCHW.shape == (count, *info.image_shape)
    assert x_BCHW.dtype == last_BCHW.dtype == weights_BK.dtype == routing_BSK.dtype == info.dtype
    assert weights_BK.shape == (count, num_experts) == (len(routing_BSK), routing_BSK.shape[2])
    assert all(array.shape == (count,) and array.dtype == np.int64 for array in numbers.values())
    assert ((numbers["plan"] >= 0) & (numbers["plan"] < len(plans))).all()
    condition = tensors["label"] if "label" in tensors else Text(*(tensors[name] for name in TEXT if name in tensors))
    assert len(condition) == count
    guided = any(plan.settings.guidance_scale != 1 for plan in plans)
    state = Trajectories(
        info,
        plans,
        numbers["plan"],
        numbers["seed"].view(np.uint64),
        numbers["position"],
        condition.to(device),
        info.null(1).to(device) if guided else None,
        x_BCHW,
        last_BCHW,
        weights_BK,
        routing_BSK,
        numbers["expert_rows"],
        numbers["router_rows"],
    )
    assert ((state.position_B >= 0) & (state.position_B <= plans.lengths[state.plan_B])).all()
    return state


def _numbers(state: Trajectories) -> dict[str, np.ndarray]:
    return {
        "plan": state.plan_B,
        "seed": state.seed_B,
        "position": state.position_B,
        "expert_rows": state.expert_rows_B,
        "router_rows": state.router_rows_B,
    }


def _tensors(condition: Condition) -> dict[str, Tensor]:
    if not isinstance(condition, Text):
        return {"label": condition}
    parts = (condition.tokens_BLE, condition.mask_BL, condition.pooled_BP)
    return {name: part for name, part in zip(TEXT, parts, strict=True) if part is not None}
