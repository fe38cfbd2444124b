"""RunConfig: what a run IS. Frozen, typed, fingerprinted; where it runs is `placement.py`."""

import re
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator

from ddm_ray.errors import ConfigError


class Part(BaseModel):
    """A frozen piece of configuration that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)


class DataConfig(Part):
    """Where the images come from and the shape (channels, image_size, image_size) they are modelled in."""

    source: Literal["digits"] = "digits"
    image_size: PositiveInt = 8
    channels: Literal[1, 3] = 1
    class_names: tuple[str, ...] = Field(min_length=1)
    heldout: float = Field(default=0.1, ge=0.0, lt=1.0, description="share of rows kept out of training")

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        if len(set(self.class_names)) < len(self.class_names):
            raise ValueError("class_names: a name comes twice")
        return self

    @property
    def num_classes(self) -> int:
        """Number of class conditions; label `num_classes` itself is the null condition."""
        return len(self.class_names)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of one modelled image."""
        return (self.channels, self.image_size, self.image_size)


class EmbedderConfig(Part):
    """How an image becomes the vector that is clustered: PCA of its pixels, or a timm network's features."""

    kind: Literal["pixels", "timm"] = "pixels"
    dim: PositiveInt = Field(default=32, description="PCA components (pixels)")
    model: str = Field(default="vit_small_patch14_dinov2.lvd142m", description="timm model name (timm)")
    checkpoint: str | None = Field(default=None, description="file of weights; none: timm's pretrained ones (timm)")
    model_args: dict[str, Any] = Field(default_factory=dict, description="more arguments of create_model")
    batch_size: PositiveInt = 256


class PartitionConfig(Part):
    """Two-level k-means: embeddings -> num_fine centroids -> num_clusters coarse ones (paper, section 4)."""

    num_clusters: PositiveInt
    num_fine: PositiveInt = 1024
    iterations: PositiveInt = 25
    sample_rows: PositiveInt = Field(default=1_000_000, description="most rows that the fine k-means is fitted on")
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _fine_is_finer(self) -> Self:
        if self.num_fine < self.num_clusters:
            raise ValueError(f"num_fine ({self.num_fine}) must be at least num_clusters ({self.num_clusters})")
        return self


class ModelConfig(Part):
    """Size of a transformer: `width` channels, `depth` blocks, square patches of `patch_size` pixels."""

    patch_size: PositiveInt = 2
    width: PositiveInt
    depth: PositiveInt
    heads: PositiveInt
    mlp_ratio: float = Field(default=4.0, gt=0)

    @model_validator(mode="after")
    def _heads_divide_width(self) -> Self:
        if self.width % self.heads or self.width % 4:
            raise ValueError(f"width ({self.width}) must be a multiple of heads ({self.heads}) and of 4")
        return self


class DenoiserConfig(ModelConfig):
    """An expert, or the monolith: a DiT; `analytic_skip` is the data's std for the skip, none for no skip."""

    analytic_skip: float | None = Field(default=None, gt=0)


Beta = Annotated[float, Field(ge=0, lt=1)]


class TrainConfig(Part):
    """One training job's schedule; all of it is identity. Batches count rows, the rate is constant."""

    steps: PositiveInt
    global_batch: PositiveInt = Field(description="the monolith's; each expert takes its K-th part")
    learning_rate: float = Field(default=1e-4, gt=0)
    warmup_steps: int = Field(default=0, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    clip_norm: float = Field(default=1.0, gt=0)
    ema_decay: float = Field(default=0.9999, ge=0, lt=1)
    condition_dropout: float = Field(default=0.1, ge=0, le=1)
    precision: Literal["fp32", "bf16"] = "fp32"
    seed: int = Field(default=0, ge=0)


class DenoiserJob(Part):
    """The experts and the monolith: same model, same steps, equal FLOPs in total."""

    model: DenoiserConfig
    train: TrainConfig


class RouterJob(Part):
    """The router: a light transformer trained on all rows to tell p(k | x_t, t, condition)."""

    model: ModelConfig
    train: TrainConfig


class SampleConfig(Part):
    """Defaults for sampling from the finished mixture."""

    strategy: str = "once"
    solver: Literal["euler", "heun", "ab2"] = "ab2"
    steps: PositiveInt = 25
    guidance_scale: float = 1.0


class EvaluateConfig(Part):
    """What the report compares: sampling strategies beside the monolith, on the same labels and seeds."""

    strategies: tuple[str, ...] = ("once", "full", "top-1", "top-2")
    num_samples: int = Field(default=2000, ge=2)
    seed: int = Field(default=0, ge=0)


class RunConfig(Part):
    """All that makes a run the run it is; `run.json` holds one of these for ever."""

    name: str = Field(min_length=1)
    data: DataConfig
    embedder: EmbedderConfig = EmbedderConfig()
    partition: PartitionConfig
    expert: DenoiserJob
    router: RouterJob
    sample: SampleConfig = SampleConfig()
    evaluate: EvaluateConfig = EvaluateConfig()

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        clusters, batch = self.partition.num_clusters, self.expert.train.global_batch
        if batch % clusters:
            raise ValueError(
                f"expert.train.global_batch ({batch}) must be a multiple of"
                f" partition.num_clusters ({clusters}), so that experts and monolith cost the same"
            )
        for field, strategy in (
            ("sample.strategy", self.sample.strategy),
            *(("evaluate.strategies", strategy) for strategy in self.evaluate.strategies),
        ):
            top = re.fullmatch(r"top-([1-9]\d*)", strategy)
            if strategy not in ("once", "full") and not (top and int(top[1]) <= clusters):
                raise ValueError(f"{field}: {strategy!r} is not once, full, or top-1 to top-{clusters}")
        if len(set(self.evaluate.strategies)) < len(self.evaluate.strategies):
            raise ValueError("evaluate.strategies: a strategy comes twice")
        for name, model in (("expert", self.expert.model), ("router", self.router.model)):
            if self.data.image_size % model.patch_size:
                raise ValueError(
                    f"{name}.model.patch_size ({model.patch_size}) must divide data.image_size ({self.data.image_size})"
                )
        return self


def one_line(error: ValidationError) -> str:
    """The first few findings of pydantic as `field: what is wrong`, joined by `; `."""
    findings = []
    for finding in error.errors()[:3]:
        field = ".".join(str(part) for part in finding["loc"])
        given = "" if finding["type"] in ("missing", "value_error") else f", got {finding['input']!r:.60}"
        message = finding["msg"].removeprefix("Value error, ")
        if finding["type"] == "extra_forbidden":
            message, given = "unknown key", ""
        findings.append(f"{field}: {message}{given}" if field else f"{message}{given}")
    return " ".join("; ".join(findings).split())


def parse_config(fields: Any, where: str) -> RunConfig:
    """RunConfig of plain JSON or YAML data; `where` names its origin in the ConfigError."""
    try:
        return RunConfig.model_validate(fields)
    except ValidationError as error:
        raise ConfigError(f"{' '.join(where.split())}: {one_line(error)}") from None


def recipe_names() -> list[str]:
    """Names of the recipes that ship with the package."""
    folder = resources.files("ddm_ray") / "recipes"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def load_recipe(recipe: str, settings: tuple[str, ...] = ()) -> RunConfig:
    """RunConfig of a shipped recipe's name or a YAML file's path, with `a.b=value` settings applied.

    Raises ConfigError for an unknown recipe, unreadable YAML, an unknown key or a value that doesn't fit.
    """
    path = Path(recipe)
    if recipe in recipe_names():
        text = (resources.files("ddm_ray") / "recipes" / f"{recipe}.yaml").read_bytes()
    elif path.suffix in (".yaml", ".yml") and path.is_file():
        text = path.read_bytes()
    else:
        raise ConfigError(f"recipe {recipe!r} is neither a shipped one ({', '.join(recipe_names())}) nor a .yaml file")
    fields = read_yaml(text, f"recipe {recipe}")
    if not isinstance(fields, dict):
        raise ConfigError(f"recipe {recipe}: holds no fields; write one as `name: value` lines")
    for setting in settings:
        _apply(fields, setting)
    return parse_config(fields, f"recipe {recipe}" + (f" with {' '.join(settings)}" if settings else ""))


def read_yaml(text: str | bytes, where: str) -> Any:
    """The plain data in YAML text. Raises ConfigError, naming `where`, for what isn't YAML in UTF-8."""
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date such as 2026-99-99
        raise ConfigError(f"{where}: not YAML: {' '.join(str(error).split())}") from None


def _apply(fields: dict[str, Any], setting: str) -> None:
    path, equals, value = setting.partition("=")
    *parents, last = path.split(".")
    if not equals or not all([*parents, last]):
        raise ConfigError(f"--set {setting!r}: write it as a.b=value, e.g. --set expert.train.steps=500")
    here: Any = fields
    for parent in parents:
        here = here.setdefault(parent, {})
        if not isinstance(here, dict):
            raise ConfigError(f"--set {setting!r}: {parent!r} has no fields below it")
    here[last] = read_yaml(value, f"--set {setting!r}")
