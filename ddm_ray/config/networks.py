"""The networks of a run: their kinds and sizes, and what they predict on which path.

A kind of denoiser is a class of `models.network.Network`, its settings here, and a line of NETWORKS.
"""

import re
from abc import abstractmethod
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, Union

from pydantic import BeforeValidator, Field, PositiveInt, model_validator

from ddm_ray.config.data import DataConfig
from ddm_ray.config.strict_model import StrictModel
from ddm_ray.core.names import PathName, PredictionName, TimeDistribution

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


class NetworkConfig(StrictModel):
    """Settings of one kind of denoiser. `code`: module and name of its class.

    `leaves_out_tokens`: the class takes `kept_BM`, and arguments `image_size` and `patch_size`. `of_diffusers`: weights
    are read from what diffusers saved, too.
    """

    code: ClassVar[str]
    leaves_out_tokens: ClassVar[bool] = False
    of_diffusers: ClassVar[bool] = False

    @classmethod
    def kind(cls) -> str:
        """Name of the class, by which specs know it."""
        return cls.code.rpartition(":")[2]

    @property
    def title(self) -> str:
        """Name of the network in messages."""
        return self.kind()

    @abstractmethod
    def arguments_for(self, data: DataConfig) -> dict[str, Any]:
        """Arguments of the class, for a run's data. ValueError if these lack what the network is conditioned on."""

    @abstractmethod
    def adapted_layers(self, data: DataConfig) -> tuple[str, ...]:
        """Layers that have an adapter where its `targets` name none."""

    def misfit(self, flow: FlowConfig, data: DataConfig) -> str:
        """Reason why it doesn't fit a run, to be read after the name of its section; empty if it does."""
        return ""


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


class DenoiserConfig(ModelConfig, NetworkConfig):
    """An expert, or the monolith: a DiT; `analytic_skip` is the data's std for the skip, none for no skip."""

    code = "ddm_ray.models.dit:DiT"
    leaves_out_tokens = True

    analytic_skip: float | None = Field(
        default=None, gt=0, description="std of the data in [-1, 1], mostly 0.5: the network then learns what is left"
    )

    def arguments_for(self, data: DataConfig) -> dict[str, Any]:
        return shape_arguments(data) | self.model_dump()

    def adapted_layers(self, data: DataConfig) -> tuple[str, ...]:
        across = () if data.text is None else ("query", "key_value", "out")
        return ("qkv", "proj", *across, "mlp.fc1", "mlp.fc2")

    def misfit(self, flow: FlowConfig, data: DataConfig) -> str:
        if self.analytic_skip is None or (flow.path, flow.prediction) == ("linear", "velocity"):
            return ""
        return (
            ".analytic_skip is for the velocity of the linear path: leave it out, or set flow.path to linear and"
            " flow.prediction to velocity"
        )


class DiffusersConfig(NetworkConfig):
    """An expert, or the monolith: a transformer of diffusers with its constructor's `arguments`.

    Arguments that the data decides (channels, text channels, image size) are filled in from `data`.
    """

    code = "ddm_ray.models.diffusers_transformer:DiffusersTransformer"
    of_diffusers = True

    name: Literal["SD3Transformer2DModel", "FluxTransformer2DModel", "PixArtTransformer2DModel"] = Field(
        description="class of diffusers; all are conditioned on text"
    )
    arguments: dict[str, Any] = Field(default_factory=dict, description="of its constructor")

    @property
    def patch_size(self) -> Any:
        """Pixels per token along each side; not checked, since it is the constructor's to refuse."""
        return 2 if self.name == "FluxTransformer2DModel" else self.arguments.get("patch_size", 2)

    @property
    def title(self) -> str:
        return self.name

    def arguments_for(self, data: DataConfig) -> dict[str, Any]:
        return {"name": self.name, "arguments": self.arguments | self._decided_by(data)}

    def adapted_layers(self, data: DataConfig) -> tuple[str, ...]:
        return "to_q", "to_k", "to_v", "to_out.0"

    def misfit(self, flow: FlowConfig, data: DataConfig) -> str:
        try:
            decided = self._decided_by(data).keys() & self.arguments.keys()
        except ValueError as error:
            return f": {error}"
        return f".arguments.{min(decided)}: follows from data, leave it out" if decided else ""

    def _decided_by(self, data: DataConfig) -> dict[str, Any]:
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


def shape_arguments(data: DataConfig) -> dict[str, Any]:
    """Arguments of networks of ours that the data decides."""
    return {
        "image_size": data.image_size,
        "channels": data.channels,
        "num_classes": data.num_classes,
        "text_dim": None if data.text is None else data.text.dim,
    }


NETWORKS: dict[str, type[NetworkConfig]] = {
    "DiT": DenoiserConfig,
    "DiffusersTransformer": DiffusersConfig,
}
"""Settings by the names of classes. The first kind's are meant where no field is another kind's own."""


def _one_kind_by_its_keys(model: Any) -> Any:
    # Chosen before its fields are checked, since pydantic's findings about a union are those of all kinds.
    if model is None or isinstance(model, NetworkConfig):
        return model
    first, *others = NETWORKS.values()
    keys = model.keys() - first.model_fields.keys() if isinstance(model, dict) else set()
    chosen = next((kind for kind in others if keys & kind.model_fields.keys()), first)
    return chosen.model_validate(model)


if TYPE_CHECKING:
    Denoiser = NetworkConfig  # mypy takes only unions that are written out
else:
    Denoiser = Annotated[Union[*NETWORKS.values()], BeforeValidator(_one_kind_by_its_keys)]
