"""Settings of sampling and of evaluation."""

from collections.abc import Callable
from typing import Annotated, Any, Self

from pydantic import AfterValidator, AliasChoices, Field, field_validator

from ddm_ray.config.data import EmbedderConfig
from ddm_ray.config.strict_model import FolderName, StrictModel
from ddm_ray.core.names import SOLVER, STEPS, STRATEGIES, TIMES, GuidanceKind, parse_strategy_name, parse_time_grid
from ddm_ray.core.solvers import SOLVERS, SolverName


def _in_grammar(parse: Callable[[str], object]) -> AfterValidator:
    def check(name: str) -> str:
        parse(name)
        return name

    return AfterValidator(check)


def _in_order(interval: tuple[float, float]) -> tuple[float, float]:
    if interval[0] > interval[1]:
        raise ValueError(f"{interval}: the smaller time comes first")
    return interval


StrategyName = Annotated[str, _in_grammar(parse_strategy_name)]
TimeGrid = Annotated[str, _in_grammar(parse_time_grid)]
Time = Annotated[float, Field(ge=0, le=1, strict=True)]
Interval = Annotated[tuple[Time, Time], AfterValidator(_in_order)]


class SamplingSettings(StrictModel):
    """Settings of sampling: one record for a run's `sample`, Python, the command line and HTTP alike.

    A field that is added here, with its range and its description, is an option of all of them.
    """

    strategy: StrategyName | None = Field(
        default=None,
        description="Experts of an image, such as "
        + ", ".join(form.example for form in STRATEGIES.values() if form.asked)
        + ". once is ancestral sampling: one expert, drawn beforehand. Where a run names none: what its own evaluation"
        " found best, and once until it has one.",
    )
    solver: SolverName = Field(
        default=SOLVER,
        description="Solver from noise to data, by its order and velocities a step: "
        + ", ".join(f"{name} {s.order}/{s.evaluations}{' (draws noise)' * s.draws}" for name, s in SOLVERS.items())
        + ".",
    )
    steps: int = Field(default=STEPS, gt=0, le=1_000_000, strict=True, description="Steps of the solver.")
    times: TimeGrid = Field(
        default=TIMES, description="Time grid of the steps: uniform, cosine or shifted-S (S > 1: dense near noise)."
    )
    guidance_scale: float = Field(
        default=1.0, strict=True, description="Scale of classifier-free guidance: 1 is none, 0 unconditional."
    )
    guidance_interval: Interval = Field(
        default=(0.0, 1.0),
        description="Times (0 data, 1 noise) outside of which there is no guidance (arXiv 2404.07724).",
    )
    guidance_kind: GuidanceKind = Field(
        default="mixture",
        validation_alias=AliasChoices("guidance_kind", "guidance"),  # `guidance` in runs made before
        description="What full guides: the mixture, each branch under its own posterior; or each expert by itself,"
        " under the conditional posterior (the paper's).",
    )
    router_temperature: float = Field(default=1.0, gt=0, strict=True, description="Divides the router's logits.")

    @property
    def strategy_or_once(self) -> str:
        """The strategy; once where none is named."""
        return self.strategy or "once"

    @field_validator("*", mode="before")
    @classmethod
    def _as_plain_python(cls, value: Any) -> Any:
        # Scalars and arrays of numpy and torch, neither of which is imported here.
        return value.tolist() if hasattr(value, "tolist") else value

    def changed(self, **fields: Any) -> Self:
        """A copy with other values for these fields, validated as they are; `guidance` is guidance_kind, too."""
        if "guidance" in fields and "guidance_kind" not in fields:
            fields["guidance_kind"] = fields.pop("guidance")
        return self.model_validate({**dict(self), **fields})


class EvaluateConfig(StrictModel):
    """Settings of an evaluation: sampling strategies beside the monolith, on the same labels and seeds."""

    strategies: tuple[str, ...] = Field(
        default=("once", "full", "top-1", "top-2"),
        description="strategies that are measured; k is at most num_clusters",
    )
    num_samples: int = Field(
        default=2000, ge=2, description="images of each; 50,000 are the field's, 500 do for a look"
    )
    seed: int = Field(default=0, ge=0, description="of their noise")
    features: EmbedderConfig | None = Field(
        default=None,
        description="network that makes features of images to compare, e.g. DINOv2; none: a small classifier of rows",
    )

    real_rows: int = Field(
        default=50_000,
        ge=2,
        description="training rows, at most, that samples are compared with; of more the first of each cluster",
    )
    clip: FolderName | None = Field(
        default=None,
        min_length=1,
        description="CLIP (a folder, or a name of the hub) that tells how images fit their texts; none: nothing does",
    )

    @field_validator("features")
    @classmethod
    def _network(cls, features: EmbedderConfig | None) -> EmbedderConfig | None:
        if features is not None and features.kind == "pixels":
            raise ValueError("kind pixels compares no looks: choose timm or transformers")
        return features
