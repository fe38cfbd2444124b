"""The networks of a run and their training: sizes, what they predict on which path, schedules."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PositiveInt, model_validator

from ddm_ray.config.data import DataConfig
from ddm_ray.config.optimizers import OptimizerName
from ddm_ray.config.strict_model import StrictModel
from ddm_ray.core.names import PathName, PredictionName, ScheduleName, TimeDistribution

SIZES: dict[str, tuple[int, int, int]] = {
    "Ti": (192, 12, 3),
    "S": (384, 12, 6),
    "B": (768, 12, 12),
    "L": (1024, 24, 16),
    "XL": (1152, 28, 16),
}
"""(width, depth, heads) by the field's names: those of ViT, and XL of DiT (arXiv 2212.09748, table 1)."""

Precision = Literal["fp32", "bf16"]
"""Precision in which networks compute."""

DIT_NAME = re.compile("dit-(s|b|l|xl)/([248])", re.IGNORECASE)


class FlowConfig(StrictModel):
    """The flow that all networks of a run are trained on: the path from data to noise, their prediction, their times.

    Times: uniform; logit-normal with `mean` and `std`; or `num_times` discrete ones. `shift` lowers their log-SNR
    by 2 log(shift), as higher resolutions want it (arXiv 2403.03206, section 5.3).
    """

    path: PathName = Field(default="linear", description="from data to noise")
    prediction: PredictionName = Field(default="velocity", description="what the networks predict")
    times: TimeDistribution = Field(default="uniform", description="distribution of the times trained on")
    mean: float = Field(default=0.0, description="of the logit (logit-normal)")
    std: float = Field(default=1.0, gt=0, description="of the logit (logit-normal)")
    num_times: PositiveInt = Field(default=1000, description="number of times (discrete)")
    shift: float = Field(default=1.0, gt=0, description="1: none; 3 for latents of 64 pixels a side and more")


class ModelConfig(StrictModel):
    """Size of a transformer: `width` channels, `depth` blocks, square patches of `patch_size` pixels.

    In place of width, depth and heads may stand `size`: Ti (192, 12, 3), S (384, 12, 6), B (768, 12, 12),
    L (1024, 24, 16) or XL (1152, 28, 16); or DiT's name in any case (DiT-XL/2), which says patch_size too.
    """

    patch_size: PositiveInt = Field(
        default=2,
        description="divides image_size; twice as large costs a quarter and blurs. 2 for latents, 4 at 64 pixels",
    )
    width: PositiveInt = Field(
        description="channels; parameters and costs grow with its square. 128 on CPUs, 384 on a GPU"
    )
    depth: PositiveInt = Field(description="blocks; costs grow with it. 4 on CPUs, 12 on a GPU")
    heads: PositiveInt = Field(description="divides width, mostly by 64")
    mlp_ratio: float = Field(default=4.0, gt=0, description="width of a block's hidden layer, over width")
    adaln: Literal["zero", "single"] = Field(default="zero", description="a modulation per block, or one for all")

    @model_validator(mode="before")
    @classmethod
    def _expand_size(cls, fields: Any) -> Any:
        if not isinstance(fields, dict) or "size" not in fields:
            return fields
        size, others = fields["size"], {name: value for name, value in fields.items() if name != "size"}
        named = DIT_NAME.fullmatch(size) if isinstance(size, str) else None
        short = named[1].upper() if named else size
        if not isinstance(short, str) or short not in SIZES:
            form = f"{', '.join(SIZES)}, or a DiT's name with its patch_size such as DiT-XL/2 (S, B, L, XL; 2, 4, 8)"
            raise ValueError(f"size: {size!r:.60} is not one of {form}")
        sizes = dict(zip(("width", "depth", "heads"), SIZES[short], strict=True))
        if named:
            sizes["patch_size"] = int(named[2])
        if twice := [name for name in sizes if name in others]:
            raise ValueError(f"size ({size}) already says {' and '.join(twice)}: give one or the other")
        return {**others, **sizes}

    @model_validator(mode="after")
    def _heads_divide_width(self) -> Self:
        if self.width % self.heads or self.width % 4:
            raise ValueError(f"width ({self.width}) must be a multiple of heads ({self.heads}) and of 4")
        return self


class DenoiserConfig(ModelConfig):
    """An expert, or the monolith: a DiT; `analytic_skip` is the data's std for the skip, none for no skip."""

    analytic_skip: float | None = Field(
        default=None, gt=0, description="std of the data in [-1, 1], mostly 0.5: the network then learns what is left"
    )


class DiffusersConfig(StrictModel):
    """An expert, or the monolith: a transformer of diffusers with its constructor's `arguments`.

    Arguments that the data decides (channels, text channels, image size) are filled in from `data`.
    """

    name: Literal["SD3Transformer2DModel", "FluxTransformer2DModel", "PixArtTransformer2DModel"] = Field(
        description="class of diffusers; all are conditioned on text"
    )
    arguments: dict[str, Any] = Field(default_factory=dict, description="of its constructor")

    @property
    def patch_size(self) -> Any:
        """Pixels per token along each side; not checked, since it is the constructor's to refuse."""
        return 2 if self.name == "FluxTransformer2DModel" else self.arguments.get("patch_size", 2)

    def shape_arguments(self, data: DataConfig) -> dict[str, Any]:
        """The arguments that the data decides. ValueError if it lacks what such a model is conditioned on."""
        text = data.text
        if text is None:
            raise ValueError(f"{self.name} is conditioned on text: set data.text")
        if self.name == "PixArtTransformer2DModel":
            shape = {"sample_size": data.image_size, "in_channels": data.channels, "caption_channels": text.dim}
            # Published PixArt models predict a variance too, so these channels may be given.
            return shape if "out_channels" in self.arguments else {**shape, "out_channels": data.channels}
        if text.pooled_dim is None:
            raise ValueError(f"{self.name} is conditioned on a pooled text vector too: set data.text.pooled_dim")
        shape = {"joint_attention_dim": text.dim, "pooled_projection_dim": text.pooled_dim}
        if self.name == "FluxTransformer2DModel":
            return {**shape, "in_channels": data.channels * self.patch_size**2}
        size = {"sample_size": data.image_size, "in_channels": data.channels, "out_channels": data.channels}
        return {**shape, **size}


Beta = Annotated[float, Field(ge=0, lt=1)]


class InitFrom(StrictModel):
    """Trained weights that a training begins with, in place of random ones.

    They are copied into the run when it is begun, and are identity by their content, wherever they came from.
    """

    source: str = Field(
        min_length=1,
        description="a run; a folder that was exported, or that save_pretrained of diffusers wrote; a"
        " .safetensors file with the network's tensors, by the names that they have here; a name on the hub",
    )
    network: str | None = Field(
        default=None,
        pattern="^(own|monolith|student|router|expert [0-9]{1,6})$",
        description="which one of it: monolith, expert 3, and so on; own: each begins with its namesake",
    )


class TrainConfig(StrictModel):
    """One training job's schedule; all of it is identity. Batches count rows.

    The rate rises linearly over `warmup_steps`; then `schedule` decides (core.schedules). Of an image's tokens the
    share `mask_ratio` is left out, in all but the last `unmasked_steps` steps (MaskDiT, arXiv 2306.09305).
    """

    steps: PositiveInt = Field(description="some thousand for a look, a hundred thousand and more for good images")
    global_batch: PositiveInt = Field(
        description="rows a step: the monolith's; each expert takes its K-th part, so a multiple of num_clusters"
    )
    optimizer: OptimizerName = Field(default="adamw", description="what makes steps of gradients")
    learning_rate: float = Field(
        default=1e-4, gt=0, description="of AdamW 2e-3 for widths of 100, 1e-4 for 1000; a fifth of it for Lion"
    )
    warmup_steps: int = Field(default=0, ge=0, description="steps until the rate is reached; mostly a twentieth")
    schedule: ScheduleName = Field(
        default="constant", description="of the rate; cosine and linear fix the number of steps"
    )
    final_learning_rate: float = Field(default=0.0, ge=0, description="the last step's (cosine, linear)")
    weight_decay: float = Field(
        default=0.0, ge=0, description="share of a weight that the optimizer takes off, times the rate"
    )
    betas: tuple[Beta, Beta] = Field(
        default=(0.9, 0.999), description="of the optimizer's means; 0.9 and 0.99 for Lion"
    )
    clip_norm: float = Field(default=1.0, gt=0, description="largest norm of a gradient")
    ema_decay: float = Field(
        default=0.9999, ge=0, lt=1, description="of the average weights, which count; a memory of 1/(1 - decay) steps"
    )
    condition_dropout: float = Field(
        default=0.1, ge=0, le=1, description="share of rows without their condition; guidance needs some"
    )
    mask_ratio: float = Field(default=0.0, ge=0, lt=1, description="share of tokens left out; halves costs at 0.5")
    unmasked_steps: int = Field(default=0, ge=0, description="last steps that see all tokens")
    precision: Precision = Field(
        default="fp32",
        description="of weights and activations as they compute, the residual stream among them; bf16 on a GPU. Losses,"
        " the optimizer and the EMA are in fp32",
    )
    seed: int = Field(default=0, ge=0, description="of weights, noise, times and dropout")
    init_from: InitFrom | None = Field(default=None, description="weights to begin with; none: random ones")

    @model_validator(mode="after")
    def _schedule_fits(self) -> Self:
        if self.warmup_steps > self.steps:
            never = "so that the learning rate would never be reached; lower it too"
            raise ValueError(f"warmup_steps {self.warmup_steps} is more than steps {self.steps}, {never}")
        if self.schedule in ("cosine", "linear"):
            if self.steps <= max(self.warmup_steps, 1):
                none = (
                    f"leaves none of steps {self.steps} for schedule {self.schedule} to fall; lower it, or raise steps"
                )
                raise ValueError(f"warmup_steps {self.warmup_steps} {none}")
            if self.final_learning_rate > self.learning_rate:
                above = f"is above learning_rate {self.learning_rate}, and no schedule rises; lower it"
                raise ValueError(f"final_learning_rate {self.final_learning_rate} {above}")
        elif self.final_learning_rate:
            reached = f"is never reached by schedule {self.schedule}; leave it out, or choose cosine or linear"
            raise ValueError(f"final_learning_rate {self.final_learning_rate} {reached}")
        return self

    @model_validator(mode="after")
    def _mask_fits(self) -> Self:
        if self.unmasked_steps and not self.mask_ratio:
            raise ValueError(f"unmasked_steps {self.unmasked_steps} is for training with a mask_ratio; leave it out")
        if self.unmasked_steps and self.unmasked_steps >= self.steps:
            raise ValueError(
                f"unmasked_steps {self.unmasked_steps} leaves none of steps {self.steps} to mask; lower it"
            )
        return self


def _one_kind_by_its_keys(model: Any) -> Any:
    # Chosen before its fields are checked, since pydantic's findings about a union are those of both kinds.
    if model is None or isinstance(model, DenoiserConfig | DiffusersConfig):
        return model
    foreign = isinstance(model, dict) and model.keys() & DiffusersConfig.model_fields.keys()
    return (DiffusersConfig if foreign else DenoiserConfig).model_validate(model)


def require_all_tokens(model: DenoiserConfig | DiffusersConfig, train: TrainConfig) -> None:
    """Raise ValueError for a network that can't leave out the tokens that its training wants to."""
    if train.mask_ratio and isinstance(model, DiffusersConfig):
        fix = f"{model.name} takes all tokens; leave it out, or train a DiT"
        raise ValueError(f"train.mask_ratio is {train.mask_ratio}, but {fix}")


Denoiser = Annotated[DenoiserConfig | DiffusersConfig, BeforeValidator(_one_kind_by_its_keys)]


class DenoiserJob(StrictModel):
    """The experts and the monolith: same model, same steps, equal FLOPs in total."""

    model: Denoiser = Field(description="the network")
    train: TrainConfig = Field(description="the schedule")

    @model_validator(mode="after")
    def _can_leave_tokens_out(self) -> Self:
        require_all_tokens(self.model, self.train)
        return self


class StudentJob(StrictModel):
    """The student: one network that is trained to predict what the mixture does (paper, section 3.4).

    Beside the teacher's predictions it may learn from the data itself, with a share `data_weight` of the loss.
    """

    model: Denoiser | None = Field(default=None, description="its network; none: one like an expert")
    train: TrainConfig | None = Field(
        default=None, description="its schedule; none: that of experts and monolith, at a quarter of the batch"
    )
    teacher: str = Field(
        default="label",
        description="who answers for a row: label, the expert of its own cluster (the paper); or the mixture by the"
        " router: full, top-2 and the like, threshold-0.1, nucleus-0.9",
    )
    data_weight: float = Field(default=0.0, ge=0, lt=1, description="share of the loss that is the data's own")
    guidance_scale: float = Field(
        default=1.0, description="guidance of the teacher's predictions: the student then needs none of its own"
    )
    start: Literal["random", "largest", "average"] = Field(
        default="random", description="first weights: random ones, the largest cluster's expert's, the experts' average"
    )

    @property
    def guided(self) -> bool:
        """True if its teacher is guided, so that it needs no guidance of its own."""
        return self.guidance_scale != 1

    @model_validator(mode="after")
    def _starts_as_its_like(self) -> Self:
        if self.start != "random" and self.model is not None:
            raise ValueError(
                f"start {self.start} takes an expert's weights, which fit an expert's model: leave model out"
            )
        if self.start != "random" and self.train is not None and self.train.init_from is not None:
            raise ValueError(f"start {self.start} and train.init_from both say what it begins with: leave one out")
        return self


class RouterJob(StrictModel):
    """The router: a light transformer trained on all rows to tell p(k | x_t, t, condition).

    Or on images that the experts sample, so that no row leaves its owner (generative replay).
    """

    model: ModelConfig = Field(description="the network; much smaller than an expert's will do")
    train: TrainConfig = Field(description="the schedule")
    replay: int = Field(
        default=0,
        ge=0,
        le=10**8,
        description="images of all experts together that it is trained on in place of rows; 0: it is trained on the"
        " rows",
    )

    @model_validator(mode="after")
    def _sees_all_tokens(self) -> Self:
        if self.train.mask_ratio:
            raise ValueError(f"train.mask_ratio is {self.train.mask_ratio}, but a router sees all tokens; leave it out")
        return self
