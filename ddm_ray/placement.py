"""Placement: WHERE and HOW a stage runs. Never part of a run's identity: change it as you like."""

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator

from ddm_ray.config import one_line, read_yaml
from ddm_ray.errors import ConfigError


class Placement(BaseModel):
    """How one island prepares rows and trains; the defaults are a laptop's."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    address: str | None = Field(default=None, description="Ray cluster to join; none: $RAY_ADDRESS, or a private one")
    workers: PositiveInt = Field(default=1, description="training processes, one per accelerator")
    resources_per_worker: dict[str, float] = Field(default_factory=lambda: {"CPU": 1.0})
    use_gpu: bool = False
    zero_stage: Literal[0, 1, 2, 3] = 1
    micro_batch: PositiveInt | None = Field(default=None, description="rows a worker takes through the model at once")
    activation_checkpointing: bool = Field(
        default=False, description="compute blocks' activations again on the way back: less memory, a third more time"
    )
    compile: bool = Field(default=False, description="torch.compile the model: minutes at the start, faster steps")
    threads: PositiveInt = Field(
        default=1, description="CPU threads of a worker; bit-equal resume needs them unchanged"
    )
    embedders: PositiveInt | None = Field(
        default=None, description="actors that embed and encode images; none: one a GPU with use_gpu, else one a CPU"
    )
    rows_gib: float | None = Field(
        default=None,
        ge=0,
        description="GiB of rows a worker may hold; more are streamed. None: a share of what is free",
    )
    cache: str | None = Field(
        default=None, description="folder for local copies of a shard in an object store; none: a temporary one"
    )
    checkpoint_steps: PositiveInt = Field(default=500, description="steps between saved training states")
    keep_states: PositiveInt = Field(default=2, description="training states that are kept, the newest ones")
    milestone_steps: PositiveInt | None = Field(default=None, description="steps between published EMA weights")
    hang_seconds: float = Field(
        default=10, gt=0, description="a step longer than 3 usual ones and this is taken for a hang"
    )
    max_failures: int = Field(
        default=3, ge=0, description="how often in a row a job may fail without a new state before it is given up"
    )

    @model_validator(mode="after")
    def _resources_are_positive(self) -> Self:
        for name, amount in self.resources_per_worker.items():
            if amount <= 0:
                raise ValueError(f"resources_per_worker.{name} must be above 0, got {amount}")
        return self


class _IslandsFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    islands: dict[str, Placement] = Field(min_length=1)


def load_placement(path: str | None, island: str | None) -> Placement:
    """The named island of an islands.yaml (its only one may go unnamed); no path: a laptop's placement.

    Raises ConfigError for an unreadable file, an unknown key, or an island that the file doesn't name.
    """
    if path is None:
        if island is not None:
            raise ConfigError(f"--island {island}: name the file it is in with --islands FILE")
        return Placement()
    try:
        islands = _IslandsFile.model_validate(read_yaml(Path(path).read_bytes(), path)).islands
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except ValidationError as error:
        raise ConfigError(f"{path}: {one_line(error)}") from None
    if island is None and len(islands) == 1:
        return next(iter(islands.values()))
    if island not in islands:
        wrong = f"no island {island!r}" if island is not None else f"names {len(islands)} islands"
        raise ConfigError(f"{path}: {wrong}; choose one with --island: {', '.join(islands)}")
    return islands[island]
