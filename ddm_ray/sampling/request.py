"""What a sampler is asked for and what it knows: request, mixture, and the calls it makes of networks.

Shapes: B images of the request, R rows of one call, CHW image, K experts, C conditions, S steps.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ddm_ray.core.calibration import Calibration, prior_ratio
from ddm_ray.core.condition import Condition, Text
from ddm_ray.core.routing import Oracle, Strategy, parse_strategy
from ddm_ray.core.solvers import SOLVERS
from ddm_ray.core.times import time_grid
from ddm_ray.errors import ExpertCountError, NullConditionError, SamplingError, TimeError

GUIDANCE = ("mixture", "per-expert")


@dataclass(frozen=True)
class SampleRequest:
    """Images wanted: one seed (0 to 2^64 - 1) and one condition for each.

    `guidance_scale` 1 evaluates the conditional branch alone, 0 the unconditional one alone, any other both, in
    steps that begin within `guidance_interval`, above its lower end (others have the scale 1). `guidance` says how a
    mixture of experts is guided under `full`: "mixture" exactly, each branch under its own posterior;
    "per-expert" each expert by itself, all under the conditional posterior, as the paper's. Sparse strategies
    use one choice of experts for both branches in either case. `cluster_B` (int64) is for the strategy `oracle`.
    """

    seeds: tuple[int, ...]
    condition: Condition
    steps: int = 25
    guidance_scale: float = 1.0
    strategy: str = "once"
    solver: str = "ab2"
    times: str = "uniform"
    guidance_interval: tuple[float, float] = (0.0, 1.0)
    guidance: str = "mixture"
    cluster_B: Tensor | None = None

    def rows(self, rows: Tensor | slice) -> "SampleRequest":
        """The request for some of its images alone."""
        index = torch.arange(len(self.seeds))[rows]
        return replace(
            self,
            seeds=tuple(self.seeds[row] for row in index.tolist()),
            condition=self.condition[index],
            cluster_B=None if self.cluster_B is None else self.cluster_B[index],
        )


@dataclass(frozen=True)
class MixtureInfo:
    """What a sampler knows of a mixture. prior_CK: row c is p(k|c), the last one p(k); None: not known, and `once`
    asks the router at pure noise.

    `num_classes` None: conditions are texts, and prior_CK has that last row alone. `alive_K` (bool, None: all)
    says which experts can be called; prior and posteriors renormalise over them. Noise and state have `dtype`,
    float32 or 64; the noise is drawn in float32 in any case. `trained_null`: the models know the null condition, label
    `num_classes` or `null_text` (one row). `router_temperature` and `router_prior_K` (the prior over experts
    that the router was trained under, None: the data's) correct the router's logits.
    """

    num_experts: int
    image_shape: tuple[int, int, int]
    num_classes: int | None
    prior_CK: Tensor | None
    alive_K: Tensor | None = None
    dtype: torch.dtype = torch.float32
    trained_null: bool = True
    null_text: Text | None = None
    router_temperature: float = 1.0
    router_prior_K: Tensor | None = None

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float32, torch.float64):
            # Times would be rounded with the state.
            raise SamplingError(f"the state's dtype is {self.dtype}: use float32 or float64; networks may have less")
        if self.router_prior_K is not None and self.prior_CK is None:
            raise SamplingError("router_prior_K corrects towards prior_CK, which isn't known")
        for name, tensor, shape in (
            ("prior_CK", self.prior_CK, ((self.num_classes or 0) + 1, self.num_experts)),
            ("alive_K", self.alive_K, (self.num_experts,)),
            ("router_prior_K", self.router_prior_K, (self.num_experts,)),
        ):
            if tensor is not None and tuple(tensor.shape) != shape:
                raise ExpertCountError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}")

    @classmethod
    def from_counts(
        cls, counts_CK: Tensor, image_shape: tuple[int, int, int], alive_K: Tensor | None = None
    ) -> "MixtureInfo":
        """From row counts per class and expert, last row: all rows per expert, labelled or not.

        A class without rows falls back to the marginal; SamplingError if the last row is all zero.
        """
        counts_CK = counts_CK.double()
        if counts_CK.ndim != 2 or counts_CK[-1].sum() <= 0:
            raise SamplingError("counts_CK needs rows in its last line, the totals per expert")
        present_C1 = counts_CK.sum(dim=1, keepdim=True) > 0
        filled_CK = torch.where(present_C1, counts_CK, counts_CK[-1])
        prior_CK = filled_CK / filled_CK.sum(dim=1, keepdim=True)
        num_conditions, num_experts = counts_CK.shape
        return cls(num_experts, image_shape, num_conditions - 1, prior_CK, alive_K)

    def with_alive(self, alive_K: Tensor) -> "MixtureInfo":
        return replace(self, alive_K=alive_K)

    def null(self, num_rows: int) -> Condition:
        """The null condition of so many rows. NullConditionError if the models have none."""
        # Without classes the models have seen no condition but the null one.
        trained = self.trained_null or self.num_classes == 0
        if not trained or (self.num_classes is None and self.null_text is None):
            raise NullConditionError(
                "these models were trained without a null condition: use guidance_scale 1, and a condition per image"
            )
        if self.num_classes is None:
            assert self.null_text is not None
            return self.null_text[torch.zeros(num_rows, dtype=torch.int64)]
        return torch.full((num_rows,), self.num_classes)

    def calibration(self) -> Calibration:
        """The correction of the router's logits."""
        if self.router_prior_K is None or self.prior_CK is None:
            return Calibration(self.router_temperature)
        return Calibration(self.router_temperature, prior_ratio(self.prior_CK[-1], self.router_prior_K))


@dataclass(frozen=True)
class ExpertCall:
    """Wanted: the velocity (R, C, H, W) of one expert at x_BCHW, t_B in [0, 1], under `condition`."""

    expert: int
    x_BCHW: Tensor
    t_B: Tensor
    condition: Condition


@dataclass(frozen=True)
class RouterCall:
    """Wanted: the router's logits (R, K) at x_BCHW, t_B in [0, 1], under `condition`."""

    x_BCHW: Tensor
    t_B: Tensor
    condition: Condition


Call = ExpertCall | RouterCall


@dataclass(frozen=True)
class Sampled:
    """Images, the experts' weights per step and image (conditional branch, at the step's start), rows paid for."""

    images_BCHW: Tensor
    routing_SBK: Tensor
    num_expert_rows: int
    num_router_rows: int

    @property
    def experts_SB(self) -> Tensor:
        """The heaviest expert per step and image, the first one on ties."""
        return self.routing_SBK.argmax(dim=2)


def validate(request: SampleRequest, info: MixtureInfo) -> Strategy:
    """The request's strategy, or SamplingError saying which field can't be met by this mixture and why."""
    num_images, scale = len(request.seeds), request.guidance_scale
    _validate_condition(request, info)
    if any(not 0 <= seed < 2**64 for seed in request.seeds):
        raise SamplingError("seeds must be from 0 to 2^64 - 1")
    if not math.isfinite(scale):
        raise SamplingError(f"guidance_scale is {scale}: use a finite number, 1 for none")
    if info.num_classes == 0 and scale not in (0, 1):
        raise NullConditionError(f"guidance_scale is {scale}, but the models have no classes to guide to: use 1")
    if scale != 1:
        info.null(1)
    low, high = request.guidance_interval
    if not 0 <= low <= high <= 1:
        raise TimeError(f"guidance_interval is ({low}, {high}): use two times in [0, 1], the smaller one first")
    if request.guidance not in GUIDANCE:
        raise SamplingError(f"unknown guidance {request.guidance!r}: use one of {', '.join(GUIDANCE)}")
    if request.solver not in SOLVERS:
        raise SamplingError(f"unknown solver {request.solver!r}: use one of {', '.join(SOLVERS)}")
    time_grid(request.times, request.steps)
    if not (math.isfinite(info.router_temperature) and info.router_temperature > 0):
        raise SamplingError(f"router_temperature is {info.router_temperature}: use a number above 0, 1 for none")
    strategy = parse_strategy(request.strategy, info.num_experts)
    cluster_B = request.cluster_B
    if isinstance(strategy, Oracle) and (
        cluster_B is None
        or cluster_B.dtype != torch.int64
        or tuple(cluster_B.shape) != (num_images,)
        or not ((cluster_B >= 0) & (cluster_B < info.num_experts)).all()
    ):
        raise SamplingError(f"strategy oracle needs cluster_B, a cluster from 0 to {info.num_experts - 1} per image")
    return strategy


def _validate_condition(request: SampleRequest, info: MixtureInfo) -> None:
    condition, num_images = request.condition, len(request.seeds)
    if isinstance(condition, Text) is not (info.num_classes is None):
        wanted = "texts" if info.num_classes is None else "class labels"
        raise SamplingError(f"the models are conditioned on {wanted}, the request has another kind of condition")
    num_conditions = len(condition) if isinstance(condition, Text) or condition.ndim else 1
    if not num_images or num_conditions != num_images:
        raise SamplingError(f"{num_images} seeds with {num_conditions} conditions: give one each")
    if isinstance(condition, Text):
        if not condition.mask_BL.any(dim=1).all():
            raise SamplingError("a text without a token: the empty prompt has its encoder's own tokens too")
        if info.null_text is not None and _form(condition) != _form(info.null_text):
            raise SamplingError(
                f"texts are {_form(condition)}, the empty one {_form(info.null_text)}: encode both alike"
            )
        return
    assert info.num_classes is not None
    if condition.ndim != 1 or condition.dtype != torch.int64:
        raise SamplingError(f"labels must be int64 of shape ({num_images},), one a seed")
    if condition.min() < 0 or condition.max() > info.num_classes:
        raise SamplingError(f"labels must be from 0 to {info.num_classes} ({info.num_classes}: no class)")
    if bool((condition == info.num_classes).any()):
        info.null(1)


def _form(text: Text) -> str:
    _, num_tokens, width = text.tokens_BLE.shape
    pooled = "no pooled vector" if text.pooled_BP is None else f"a pooled vector of {text.pooled_BP.shape[1]}"
    return f"{num_tokens} tokens of {width} channels with {pooled}"
