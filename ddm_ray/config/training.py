"""The trainings of a run: schedules, optimizers, and what experts, student and router each learn from."""

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from ddm_ray.config.adapters import AdapterConfig
from ddm_ray.config.networks import Denoiser, ModelConfig, NetworkConfig, Precision
from ddm_ray.config.optimizers import OptimizerName
from ddm_ray.config.strict_model import StrictModel
from ddm_ray.core.names import ScheduleName

Beta = Annotated[float, Field(ge=0, lt=1)]


class InitFrom(StrictModel):
    """Trained weights that a training begins with, in place of random ones.

    They are copied into the run when it is created, and are identity by their content, wherever they came from.
    """

    source: str = Field(
        min_length=1,
        description="a run; a folder that was exported, or that save_pretrained of diffusers wrote; a"
        " .safetensors file with the network's tensors, by the names that they have here; a name on the hub",
    )
    network: str | None = Field(
        default=None,
        pattern="^(own|nearest|monolith|student|router|expert [0-9]{1,9})$",
        description="which one of it: monolith, expert 3, and so on; own: each begins with its namesake; nearest: a new"
        " cluster's expert with that of the nearest cluster",
    )


class TrainConfig(StrictModel):
    """One training job's schedule; all of it is identity. Batches count rows.

    The rate rises linearly over `warmup_steps`; then `schedule` decides (core.schedules). Of an image's tokens the
    share `mask_ratio` is left out, in all but the last `unmasked_steps` steps (MaskDiT, arXiv 2306.09305).
    """

    steps: PositiveInt = Field(description="some thousand for a look, a hundred thousand and more for good images")
    batch: PositiveInt = Field(
        description="rows a step; of expert.train those of each expert, of which the monolith takes the sum"
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
        default=0.9999,
        ge=0,
        lt=1,
        description="of the average weights, which count; a memory of 1/(1 - decay) steps, shorter at first",
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


def require_all_tokens(model: NetworkConfig, train: TrainConfig) -> None:
    """Raise ValueError for a network that can't leave out the tokens that its training wants to."""
    if train.mask_ratio and not model.leaves_out_tokens:
        fix = f"{model.title} takes all tokens; leave it out, or train a DiT"
        raise ValueError(f"train.mask_ratio is {train.mask_ratio}, but {fix}")


class DenoiserJob(StrictModel):
    """The experts and the monolith: same model, same steps, equal FLOPs in total.

    The batch is that of one expert. The monolith's is the sum over all experts.
    """

    model: Denoiser = Field(description="the network")
    adapter: AdapterConfig | None = Field(
        default=None, description="trained beside the network, which stays as train.init_from has it; none: no adapter"
    )
    train: TrainConfig = Field(description="the schedule")

    @model_validator(mode="after")
    def _can_leave_tokens_out(self) -> Self:
        require_all_tokens(self.model, self.train)
        return self

    @model_validator(mode="after")
    def _adapter_has_a_base(self) -> Self:
        if self.adapter is None:
            return self
        if self.train.init_from is None:
            raise ValueError("adapter is trained beside a network: name its weights in train.init_from")
        if self.train.init_from.network in ("own", "nearest"):
            raise ValueError(
                f"train.init_from.network is {self.train.init_from.network}, and adapters have one base: name a network"
            )
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
        description="what answers for a row: label, the expert of its own cluster (the paper); or the mixture by the"
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
