"""The records of sampling: request, mixture, the calls of networks, and the result.

Shapes: B images of the request, R rows of one call, CHW image, K experts, C conditions, S steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ddm_ray.config import SamplingSettings
from ddm_ray.core.condition import Condition, Text
from ddm_ray.core.routing import Oracle, Strategy, parse_strategy
from ddm_ray.errors import ExpertCountError, SamplingError


@dataclass(frozen=True)
class SampleRequest:
    """Images to sample: one seed (0 to 2^64 - 1) and one condition for each, and how all are sampled.

    `cluster_B` (int64) is for the strategy `oracle`: the expert of each image. `noise_BCHW` (standard normal) takes the
    place of the noise that seeds draw; these still draw experts.
    """

    seeds: tuple[int, ...]
    condition: Condition = field(repr=False)
    settings: SamplingSettings = field(default_factory=SamplingSettings)
    cluster_B: Tensor | None = field(default=None, repr=False)
    noise_BCHW: Tensor | None = field(default=None, repr=False)

    def changed(self, **fields: Any) -> "SampleRequest":
        """The same images with other values for these fields of the settings."""
        return replace(self, settings=self.settings.changed(**fields))

    def rows(self, rows: Tensor | slice) -> "SampleRequest":
        """The request for some of its images alone."""
        index = torch.arange(len(self.seeds))[rows]
        return replace(
            self,
            seeds=tuple(self.seeds[row] for row in index.tolist()),
            condition=self.condition[index],
            cluster_B=None if self.cluster_B is None else self.cluster_B[index],
            noise_BCHW=None if self.noise_BCHW is None else self.noise_BCHW[index.to(self.noise_BCHW.device)],
        )


@dataclass(frozen=True)
class MixtureInfo:
    """Facts about a mixture. prior_CK: row c is p(k|c), the last one p(k); None: not known, and `once`
    asks the router at pure noise.

    `numbers`: of the experts' clusters, in ascending order; none: 0 to K - 1. All arrays have experts by position.

    `num_classes` None: conditions are texts, and prior_CK has that last row alone. `available_K` (bool, None: all)
    says which experts can be called; prior and posteriors renormalise over them. Noise and state have `dtype`,
    float32 or 64; the noise is drawn in float32 in any case. `trained_null`: the models know the null condition, label
    `num_classes` or `null_text` (one row).
    """

    num_experts: int
    image_shape: tuple[int, int, int]
    num_classes: int | None
    prior_CK: Tensor | None = field(repr=False)
    available_K: Tensor | None = None
    dtype: torch.dtype = torch.float32
    trained_null: bool = True
    null_text: Text | None = None
    numbers: tuple[int, ...] = ()

    @property
    def clusters(self) -> tuple[int, ...]:
        """The numbers of the experts' clusters, by which people name them."""
        return self.numbers or tuple(range(self.num_experts))

    def __post_init__(self) -> None:
        if self.numbers and len(self.numbers) != self.num_experts:
            raise ExpertCountError(f"{len(self.numbers)} numbers for a mixture of {self.num_experts} experts")
        if self.dtype not in (torch.float32, torch.float64):
            # Times would be rounded with the state.
            raise SamplingError(f"the state's dtype is {self.dtype}: use float32 or float64; networks may have less")
        for name, tensor, shape in (
            ("prior_CK", self.prior_CK, ((self.num_classes or 0) + 1, self.num_experts)),
            ("available_K", self.available_K, (self.num_experts,)),
        ):
            if tensor is not None and tuple(tensor.shape) != shape:
                raise ExpertCountError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}")

    @classmethod
    def from_counts(
        cls, counts_CK: Tensor, image_shape: tuple[int, int, int], available_K: Tensor | None = None
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
        return cls(num_experts, image_shape, num_conditions - 1, prior_CK, available_K)

    def with_available(self, available_K: Tensor) -> "MixtureInfo":
        return replace(self, available_K=available_K)

    def null(self, num_rows: int) -> Condition:
        """The null condition of so many rows. SamplingError if the models have none."""
        # Without classes the models have seen no condition but the null one.
        trained = self.trained_null or self.num_classes == 0
        if not trained or (self.num_classes is None and self.null_text is None):
            raise SamplingError(
                "these models were trained without a null condition: use guidance_scale 1, and a condition per image"
            )
        if self.num_classes is None:
            assert self.null_text is not None
            return self.null_text[torch.zeros(num_rows, dtype=torch.int64)]
        return torch.full((num_rows,), self.num_classes)


@dataclass(frozen=True)
class ExpertCall:
    """Wanted: the velocity (R, C, H, W) of one expert at x_BCHW, t_B in [0, 1], under `condition`."""

    expert: int
    x_BCHW: Tensor
    t_B: Tensor
    condition: Condition = field(repr=False)


@dataclass(frozen=True)
class RouterCall:
    """Wanted: the router's logits (R, K) at x_BCHW, t_B in [0, 1], under `condition`."""

    x_BCHW: Tensor
    t_B: Tensor
    condition: Condition = field(repr=False)


NetworkCall = ExpertCall | RouterCall


@dataclass(frozen=True)
class SampleResult:
    """Images, the experts' weights per step and image (conditional branch, at the step's start), rows paid for.

    `clusters`: the numbers of the experts' clusters.
    """

    images_BCHW: Tensor = field(repr=False)
    routing_SBK: Tensor = field(repr=False)
    num_expert_rows: int
    num_router_rows: int
    clusters: tuple[int, ...]

    @property
    def experts_SB(self) -> Tensor:
        """The position of the heaviest expert per step and image, the first one on ties."""
        return self.routing_SBK.argmax(dim=2)

    @property
    def numbers_SB(self) -> Tensor:
        """The number of the heaviest expert's cluster per step and image."""
        return torch.tensor(self.clusters)[self.experts_SB]


def strategy_of(settings: SamplingSettings, num_experts: int) -> Strategy:
    """The strategy of the settings, `once` where they name none; SamplingError if K is too small for it."""
    return parse_strategy(settings.strategy_or_once, num_experts)


def validate(request: SampleRequest, info: MixtureInfo) -> Strategy:
    """The request's strategy. SamplingError for what this mixture can't meet; the settings alone are valid already."""
    num_images, scale = len(request.seeds), request.settings.guidance_scale
    require_seeds(request.seeds)
    if request.noise_BCHW is not None and tuple(request.noise_BCHW.shape) != (num_images, *info.image_shape):
        raise SamplingError(
            f"noise has shape {tuple(request.noise_BCHW.shape)}: {num_images} images of these models need"
            f" {(num_images, *info.image_shape)}"
        )
    _validate_condition(request, info)
    if info.num_classes == 0 and scale not in (0, 1):
        raise SamplingError(f"guidance_scale is {scale}, but the models have no classes to guide to: use 1")
    if scale != 1:
        info.null(1)
    strategy, cluster_B = strategy_of(request.settings, info.num_experts), request.cluster_B
    if isinstance(strategy, Oracle) and (
        cluster_B is None
        or cluster_B.dtype != torch.int64
        or tuple(cluster_B.shape) != (num_images,)
        or not ((cluster_B >= 0) & (cluster_B < info.num_experts)).all()
    ):
        raise SamplingError(f"strategy oracle needs a cluster from 0 to {info.num_experts - 1} for each image")
    return strategy


def require_seeds(seeds: Sequence[int]) -> None:
    """SamplingError for a seed outside 0 to 2^64 - 1."""
    if any(not 0 <= seed < 2**64 for seed in seeds):
        raise SamplingError("seeds must be from 0 to 2^64 - 1")


def _validate_condition(request: SampleRequest, info: MixtureInfo) -> None:
    condition, num_images = request.condition, len(request.seeds)
    if isinstance(condition, Text) is not (info.num_classes is None):
        kind = "texts" if info.num_classes is None else "class labels"
        raise SamplingError(f"the models are conditioned on {kind}, the request has another kind of condition")
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
    least, most = (int(end) for end in condition.aminmax())
    if least < 0 or most > info.num_classes:
        raise SamplingError(f"labels must be from 0 to {info.num_classes} ({info.num_classes}: no class)")
    if most == info.num_classes:
        info.null(1)


def _form(text: Text) -> str:
    _, num_tokens, width = text.tokens_BLE.shape
    pooled = "no pooled vector" if text.pooled_BP is None else f"a pooled vector of {text.pooled_BP.shape[1]}"
    return f"{num_tokens} tokens of {width} channels with {pooled}"
