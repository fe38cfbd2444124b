"""Placement: WHERE and HOW a stage runs. It is never part of a run's identity, so it may change at any time."""

import json
import math
import os
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt, ValidationError, field_validator, model_validator

from ddm_ray.config import invalid_fields, read_yaml
from ddm_ray.config.strict_model import StrictModel
from ddm_ray.errors import ConfigError
from ddm_ray.remedies import Give
from ddm_ray.submitted import submitted_job

# Resources that Ray knows itself. Nodes are started with any others: --resources '{"island-a": 4}'.
PREDEFINED = ("CPU", "GPU", "memory", "object_store_memory")
# Default minutes between saved states. A state of 3 billion parameters is 48 GB.
MINUTES = 5.0
MAX_JSON = 10_000
USE_GPU = Field(default=False, description="one GPU a worker; nccl in place of gloo")


class Workers(StrictModel):
    """Number of workers of a job: as many as there are nodes for, from `min` to `max`."""

    min: PositiveInt
    max: PositiveInt

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.max < self.min:
            raise ValueError(f"max {self.max} is below min {self.min}")
        return self

    @property
    def elastic(self) -> bool:
        """True if the number may change while a job runs."""
        return self.max > self.min


class TrainPlacement(StrictModel):
    """Placement of a training job: workers, their resources, memory and states. The defaults suit a laptop."""

    workers: Workers = Field(
        default=Workers(min=1, max=1),
        description="training processes, one per accelerator: a number, or {min: 2, max: 8} to shrink when nodes are"
        " lost and to grow when they come; the batch is the same at any size",
    )
    resources_per_worker: dict[str, float] = Field(
        default_factory=lambda: {"CPU": 1.0},
        description="what each worker asks of Ray; a custom resource in whole numbers, as in {CPU: 4, island-a: 1},"
        " binds a job to the nodes that have it",
    )
    use_gpu: bool = USE_GPU
    zero_stage: Literal[0, 1, 2, 3] = Field(
        default=1,
        description="what DeepSpeed shards over workers: 0 nothing, 1 optimizer state, 2 gradients, 3 parameters too",
    )
    micro_batch: Annotated[int, Field(ge=1, strict=True)] | None = Field(
        default=None,
        description="rows a worker takes through the model at once; none: its whole share. Halved where memory runs"
        " out",
    )
    teachers: Annotated[int, Field(ge=2, strict=True)] | None = Field(
        default=None,
        description="experts that a student's worker holds at a time, the others in their files; none: all of them",
    )
    activation_checkpointing: bool = Field(
        default=False, description="compute a block's activations again in the backward pass: less memory, more time"
    )
    compile: bool | None = Field(
        default=None,
        description="torch.compile the model's blocks and the optimizer's update: a longer first step, faster ones"
        " after it; not with zero_stage 3. None: on a GPU, unless it can't be compiled there",
    )
    threads: PositiveInt | None = Field(
        default=None, description="CPU threads of a worker; none: one a CPU that it asks for. A job keeps its number"
    )
    rows_gib: float | None = Field(
        default=None,
        ge=0,
        description="GiB of rows a worker may hold; more are streamed. None: a share of what is free",
    )
    cache: str | None = Field(
        default=None,
        description="folder for copies of an object store's shards and teachers, and of compiled code; none: temporary",
    )
    checkpoint_minutes: float | None = Field(
        default=None,
        ge=0,
        description="minutes between saved training states: what a killed worker costs at most; without"
        " checkpoint_steps a third of the time trained while that is less. None: 5; 0: by steps alone",
    )
    checkpoint_steps: PositiveInt | None = Field(
        default=None, description="steps between saved training states, beside those of checkpoint_minutes"
    )
    keep_states: PositiveInt = Field(
        default=2, description="newest training states kept; one more than 1 outlives a damaged file"
    )
    milestone_steps: PositiveInt | None = Field(
        default=None, description="steps between published weights, to sample from meanwhile; none: only the last"
    )
    keep_milestones: PositiveInt | None = Field(
        default=None, description="newest of those kept, also if an evaluation measures older ones; none: all of them"
    )
    pictures: bool = Field(
        default=True,
        description="paint what the model samples as training goes on, beside some saved states, for 1 % of the time at"
        " most; false: only with published weights. Changes nothing of what is trained",
    )
    heldout_rows: NonNegativeInt = Field(
        default=256,
        description="held-out rows of which the loss by the EMA weights is measured as training goes on, for 6 % of its"
        " cost at first, ever less later; 0: none. Changes nothing of what is trained",
    )
    hang_seconds: float = Field(
        default=10,
        gt=0,
        description="a step that takes longer than 3 usual ones and this many seconds is taken for a hang, as is a"
        " process that doesn't run for so long; its attempt ends and the next one begins",
    )
    max_failures: int = Field(
        default=3,
        ge=0,
        description="failures in a row, of workers or of the controller that starts them, that a launch survives"
        " without a newly saved state; then it gives up",
    )

    @field_validator("workers", mode="before")
    @classmethod
    def _one_number_is_both(cls, given: Any) -> Any:
        if isinstance(given, Workers | dict):
            return given
        if not isinstance(given, int) or isinstance(given, bool):
            raise ValueError(f"is a whole number, or {{min: 1, max: 4}}, got {given!r:.60}")
        if given < 1:
            raise ValueError(f"must be 1 or more, got {given}")
        return {"min": given, "max": given}

    @model_validator(mode="after")
    def _resources_can_be_asked_for(self) -> Self:
        if not self.resources_per_worker and not self.use_gpu:
            raise ValueError("resources_per_worker is empty; a worker needs something to be placed by, as {CPU: 1}")
        if "GPU" in self.resources_per_worker and not self.use_gpu:
            raise ValueError("resources_per_worker asks for GPU; set use_gpu: true too, or leave it out")
        for name, amount in self.resources_per_worker.items():
            if amount <= 0:
                raise ValueError(f"resources_per_worker.{name} must be above 0, got {amount}")
            if name not in PREDEFINED and amount % 1:
                # Ray divides and rounds down to count the workers that fit, which errs for fractions such as 0.1.
                raise ValueError(
                    f"resources_per_worker.{name} must be a whole number, got {amount}: workers on a slice are counted"
                    f" in whole ones; give its nodes more {name}"
                )
        return self

    @model_validator(mode="after")
    def _blocks_can_be_compiled(self) -> Self:
        if self.compile and self.zero_stage == 3:
            raise ValueError("compile doesn't go with zero_stage 3: choose zero_stage 1 or 2, or compile: false")
        return self

    @property
    def minutes_between_states(self) -> float:
        """Minutes after which a state is due; infinite if states are saved by steps alone."""
        return MINUTES if self.checkpoint_minutes is None else self.checkpoint_minutes or math.inf

    @property
    def asked(self) -> dict[str, float]:
        """Resources of one worker, by their names in Ray."""
        return ({"GPU": 1.0} if self.use_gpu else {}) | self.resources_per_worker

    @property
    def slices(self) -> tuple[str, ...]:
        """Custom resources that bind workers to a slice of a cluster: the nodes that were started with them."""
        return tuple(name for name in self.resources_per_worker if name not in PREDEFINED)


class PreparePlacement(StrictModel):
    """Placement of the stage that prepares rows: the actors that embed and encode them."""

    use_gpu: bool = USE_GPU
    embedders: PositiveInt | None = Field(
        default=None, description="actors that embed and encode images; none: one a GPU with use_gpu, else one a CPU"
    )


class _Site(StrictModel):
    """Site of an island."""

    address: str | None = Field(
        default=None,
        description="Ray cluster to join, as HEAD:6379; none: $RAY_ADDRESS, or a private one. A submitted job joins the"
        " cluster that it was submitted to instead",
    )
    jobs: str | None = Field(
        default=None,
        description="URL of the cluster's Jobs API, as http://HEAD:8265, for `ray job submit` and for a launcher",
    )
    token_file: str | None = Field(
        default=None, description="file that has the cluster's token; none: what RAY_AUTH_TOKEN_PATH names"
    )
    price_per_hour: float | None = Field(
        default=None, ge=0, description="of all its workers together, in any currency; for plans"
    )
    memory_gib: float | None = Field(
        default=None,
        gt=0,
        description="GiB that one worker has, of its GPU or of a machine: it takes no model that needs more; for plans",
    )

    @field_validator("address")
    @classmethod
    def _no_url_of_the_jobs_api(cls, given: str | None) -> str | None:
        if given is not None and given.startswith(("http://", "https://")):
            raise ValueError(f"is a cluster's own address, as HEAD:6379; {given} goes into jobs")
        return given

    @field_validator("jobs")
    @classmethod
    def _url_of_the_jobs_api(cls, given: str | None) -> str | None:
        if given is None:
            return None
        try:
            url = urlsplit(given)
            known = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
        except ValueError:  # no port
            known = False
        if not known:
            raise ValueError(f"is a URL, as http://HEAD:8265, got {given!r:.60}")
        return given.rstrip("/")


class Island(_Site):
    """A Ray cluster, or a slice of one, that prepares and trains on its own. The default is this machine."""

    name: str = ""
    train: TrainPlacement = TrainPlacement()
    prepare: PreparePlacement = PreparePlacement()

    def ray(self, address: str | None = None) -> tuple[str | None, str | None]:
        """Address of the Ray to join, and the file with its token. None leaves either to the environment.

        An explicit `address` comes first, then the cluster of the submitted job that this process is.
        """
        if address:
            return address, self.token_file
        own = os.environ.get("RAY_ADDRESS") if submitted_job() is not None else None
        return (own, None) if own else (self.address, self.token_file)

    @property
    def memory(self) -> float | None:
        """Bytes of memory that one worker has; None if the file doesn't say."""
        return None if self.memory_gib is None else self.memory_gib * 2**30

    def to_json(self) -> str:
        """The fields of islands.yaml that a job on this island needs, as JSON without defaults.

        Address and token are left out, since the job runs on the island itself.
        """
        site = self.model_dump(include={"price_per_hour", "memory_gib"}, exclude_defaults=True)
        prepare = self.prepare.model_dump(exclude_defaults=True)
        return json.dumps(site | prepare | self.train.model_dump(exclude_defaults=True), sort_keys=True)

    @classmethod
    def from_json(cls, name: str, text: str) -> "Island":
        """The island of this name that `to_json` wrote. Raises ConfigError for anything else."""
        try:
            return IslandFields.model_validate_json(text[:MAX_JSON]).island(name)
        except ValidationError as error:
            raise ConfigError(f"placement of island {name}: {invalid_fields(error, IslandFields)}") from None


class IslandFields(_Site, TrainPlacement, PreparePlacement):
    """An island as islands.yaml describes it, with all fields on one level."""

    def island(self, name: str) -> Island:
        """The island of this name, with one record for training and one for preparation."""

        def fields_of(record: type[BaseModel]) -> dict[str, Any]:
            return {field: getattr(self, field) for field in record.model_fields}

        train, prepare = TrainPlacement(**fields_of(TrainPlacement)), PreparePlacement(**fields_of(PreparePlacement))
        return Island(name=name, **fields_of(_Site), train=train, prepare=prepare)


ISLAND_FIELDS = IslandFields.model_fields
"""The fields of an island in islands.yaml, by name."""


class _IslandsFile(StrictModel):
    islands: dict[str, IslandFields] = Field(min_length=1)


def load_islands(path: str) -> dict[str, Island]:
    """The islands of an islands.yaml, by name. Raises ConfigError for an unreadable file or an unknown key."""
    try:
        islands = _IslandsFile.model_validate(read_yaml(Path(path).read_bytes(), path, _IslandsFile)).islands
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except ValidationError as error:
        raise ConfigError(f"{path}: {invalid_fields(error, IslandFields)}") from None
    return {name: fields.island(name) for name, fields in islands.items()}


def load_island(path: str | None, name: str | None) -> Island:
    """The named island of an islands.yaml, or this machine if there is no path. A single island needs no name.

    Raises ConfigError for an unreadable file, an unknown key, or an unknown island.
    """
    if path is None:
        if name is not None:
            raise ConfigError(f"island {name}: in which file", Give("islands", "name it", "FILE"))
        return Island()
    islands = load_islands(path)
    if name is None and len(islands) == 1:
        (name,) = islands
    if name not in islands:
        problem = f"no island {name!r}" if name is not None else f"names {len(islands)} islands"
        raise ConfigError(f"{path}: {problem}", Give("island", f"choose one of {', '.join(islands)}"))
    return islands[name]
