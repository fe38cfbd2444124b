"""RunConfig, the whole of a configuration, and its mistakes told in one line."""

import math
import re
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, ValidationError, model_validator

from ddm_ray.config.changes import Changes
from ddm_ray.config.data import DataConfig, EmbedderConfig, PartitionConfig
from ddm_ray.config.experts import ExpertChanges
from ddm_ray.config.fields import meant_field
from ddm_ray.config.networks import FlowConfig, NetworkConfig
from ddm_ray.config.older import with_own_batches
from ddm_ray.config.sampling import EvaluateConfig, SamplingSettings
from ddm_ray.config.strict_model import StrictModel
from ddm_ray.config.training import DenoiserJob, RouterJob, StudentJob, TrainConfig, require_all_tokens
from ddm_ray.core.names import STRATEGIES, parse_strategy_name, strategy_form
from ddm_ray.errors import ConfigError
from ddm_ray.spelling import meant, numbers_in_words, one_line


class RunConfig(StrictModel):
    """All that makes a run the run it is; `run.json` holds one of these for ever.

    `acceptance`: when what islands have trained counts for stages that build on it, sample or serve it: once it is
    finished, or once somebody who may write below `accepted/` has accepted it.
    """

    name: str = Field(min_length=1, description="of the run, for people")
    data: DataConfig = Field(description="images and their conditions")
    embedder: EmbedderConfig = Field(default=EmbedderConfig(), description="by what images are clustered")
    partition: PartitionConfig = Field(description="into clusters, one an expert")
    changes: Changes = Field(default=Changes(), description="of the clusters, since the run that it was derived from")
    flow: FlowConfig = Field(default=FlowConfig(), description="what all networks learn")
    expert: DenoiserJob = Field(description="the experts; the monolith, too")
    experts: dict[Annotated[int, Field(ge=0)], ExpertChanges] = Field(
        default={}, description="by cluster, in what its expert differs from the others: {3: {model: {size: S}}}"
    )
    router: RouterJob = Field(description="the router")
    student: StudentJob = Field(default=StudentJob(), description="one network in place of all")
    sample: SamplingSettings = Field(default=SamplingSettings(), description="defaults of sampling")
    evaluate: EvaluateConfig = Field(default=EvaluateConfig(), description="of an evaluation")
    acceptance: Literal["at_once", "by_hand"] = Field(
        default="at_once", description="trained weights count at once, or by_hand: once a person accepts them"
    )

    @property
    def monolith(self) -> DenoiserJob:
        """The monolith: a network like an expert, and all experts' batches together (equal FLOPs; paper, section 4)."""
        together = sum(self.expert_of(cluster).train.batch for cluster in self.partition.clusters)
        return self.expert.model_copy(update={"train": self.expert.train.model_copy(update={"batch": together})})

    def expert_of(self, cluster: int) -> DenoiserJob:
        """A cluster's expert: network and schedule."""
        if (changes := self.experts.get(cluster)) is None:
            return self.expert
        parts = {name: _changed(changes, name, getattr(self.expert, name)) for name in ("model", "train")}
        return DenoiserJob.model_validate({**parts, "adapter": self.expert.adapter})

    def flow_of(self, cluster: int | None) -> FlowConfig:
        """The flow that a cluster's expert learns. None: that of all else, of which the router's path is one."""
        changes = None if cluster is None else self.experts.get(cluster)
        return self.flow if changes is None else FlowConfig.model_validate(_changed(changes, "flow", self.flow))

    @property
    def student_model(self) -> NetworkConfig:
        """The student's network: one like an expert unless it says otherwise."""
        return self.student.model or self.expert.model

    @property
    def student_train(self) -> TrainConfig:
        """The student's schedule: its own, or the monolith's at a quarter of the batch (paper, section 4).

        Without one of its own it begins as `student.start` says, whatever the experts begin with.
        """
        train = self.monolith.train
        changes = {"batch": max(1, train.batch // 4), "init_from": None}
        return self.student.train or train.model_copy(update=changes)

    @model_validator(mode="before")
    @classmethod
    def _read_older_names(cls, fields: Any) -> Any:
        return with_own_batches(fields)

    @model_validator(mode="after")
    def _experts_fit(self) -> Self:
        for cluster in self.experts:
            if cluster not in self.partition.clusters:
                known = numbers_in_words(self.partition.clusters)
                raise ValueError(f"experts.{cluster}: there is no such cluster: they are {known}")
            changes = self.experts[cluster]
            if self.expert.adapter and (changes.model or changes.flow or "init_from" in changes.train):
                raise ValueError(
                    f"experts.{cluster}: experts with adapters have one network, one flow and one base: leave out"
                    " model, flow and train.init_from"
                )
            model, flow = self._of_expert(cluster)
            size = getattr(model, "patch_size", None)
            if isinstance(size, int) and size > 0 and self.data.image_size % size:
                raise ValueError(
                    f"experts.{cluster}.model.patch_size ({size}) must divide data.image_size ({self.data.image_size})"
                )
            if misfit := model.misfit(flow, self.data):
                raise ValueError(f"experts.{cluster}.model{misfit}")
            init = self.expert_of(cluster).train.init_from
            alike = (model, flow) == (self.expert.model, self.flow)
            if init is not None and init == self.expert.train.init_from and init.network != "own" and not alike:
                raise ValueError(
                    f"experts.{cluster}: another network than expert.model can't begin with expert.train.init_from: set"
                    f" experts.{cluster}.train.init_from to other weights, or to null"
                )
        return self

    def _of_expert(self, cluster: int) -> tuple[NetworkConfig, FlowConfig]:
        """The network and the flow of an expert that differs. Raises ValueError that names the fields."""
        where = f"experts.{cluster}"
        try:
            model = self.expert_of(cluster).model
        except ValidationError as error:
            raise ValueError(invalid_fields(error, DenoiserJob, where)) from None
        try:
            return model, self.flow_of(cluster)
        except ValidationError as error:
            raise ValueError(invalid_fields(error, FlowConfig, f"{where}.flow")) from None

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        clusters = self.partition.num_clusters
        if self.sample.guidance_scale != 1 and (without := self._without_null):
            raise ValueError(
                f"sample.guidance_scale ({self.sample.guidance_scale}) needs a null condition: train with"
                f" {without[0]}.train.condition_dropout above 0"
            )
        if self.sample.strategy is not None:
            _require_strategy("sample.strategy", self.sample.strategy, clusters)
        for strategy in self.evaluate.strategies:
            _require_strategy("evaluate.strategies", strategy, clusters)
        if len(set(self.evaluate.strategies)) < len(self.evaluate.strategies):
            raise ValueError("evaluate.strategies: a strategy comes twice")
        for name, model in self._models:
            # Of diffusers' arguments only a whole number can be judged here, and a network may have no patches.
            size = getattr(model, "patch_size", None)
            if isinstance(size, int) and size > 0 and self.data.image_size % size:
                raise ValueError(
                    f"{name}.model.patch_size ({size}) must divide data.image_size ({self.data.image_size})"
                )
        return self

    @property
    def _models(self) -> list[tuple[str, Any]]:
        models = [("expert", self.expert.model), ("router", self.router.model), ("student", self.student.model)]
        return [(name, model) for name, model in models if model is not None]

    @property
    def _without_null(self) -> list[str]:
        """The fields of experts that don't learn the null condition."""
        trains = {
            "expert": self.expert.train,
            **{f"experts.{each}": self.expert_of(each).train for each in self.experts},
        }
        return [name for name, train in trains.items() if not train.condition_dropout]

    @property
    def experts_know_null(self) -> bool:
        """True if each expert learns the null condition, which guidance asks it under."""
        return all(self.expert_of(cluster).train.condition_dropout > 0 for cluster in self.partition.clusters)

    @model_validator(mode="after")
    def _student_can_be_taught(self) -> Self:
        teacher, clusters = self.student.teacher, self.partition.num_clusters
        if teacher != "label":
            _require_strategy("student.teacher", teacher, clusters)
            if not strategy_form(parse_strategy_name(teacher, clusters)[0]).teaches:
                others = ", ".join(["label", *(form.example for form in STRATEGIES.values() if form.teaches)])
                raise ValueError(
                    f"student.teacher: {teacher!r} holds experts along an image's way, and rows have none: use one like"
                    f" {others}"
                )
        try:
            require_all_tokens(self.student_model, self.student_train)
        except ValueError as error:
            raise ValueError(f"student: {error}") from None
        self._require_known_null()
        self._require_a_start()
        return self

    def _require_known_null(self) -> None:
        """Raise ValueError where the student, or its teacher, is asked without a condition that it never saw."""
        guided, dropped = self.student.guided, self.student_train.condition_dropout
        asked = "student.guidance_scale" if guided else "student.train.condition_dropout"
        without = self._without_null
        if self.student.teacher != "label" and not self.router.train.condition_dropout:
            without.append("router")
        if (guided or dropped) and without:
            raise ValueError(
                f"{asked} needs teachers that know the null condition: set {without[0]}.train.condition_dropout above 0"
            )
        if not dropped and not guided and self.sample.guidance_scale != 1:
            raise ValueError(
                f"student.train.condition_dropout is 0, and sample.guidance_scale {self.sample.guidance_scale} needs a"
                " null condition: raise it, or set student.guidance_scale"
            )

    def _require_a_start(self) -> None:
        """Raise ValueError where the student is to begin with weights of experts, and these aren't alike."""
        alike = self.expert.model, self.flow
        if self.student.start != "random" and self.expert.adapter:
            raise ValueError(
                f"student.start {self.student.start} takes weights of whole networks, not adapters: use random"
            )
        for cluster in self.experts if self.student.start != "random" else ():
            if (self.expert_of(cluster).model, self.flow_of(cluster)) != alike:
                raise ValueError(
                    f"student.start {self.student.start} takes weights of experts that are alike, and experts.{cluster}"
                    " is another network or learns another flow: use random"
                )

    @model_validator(mode="after")
    def _replay_has_classes(self) -> Self:
        if self.router.replay and self.data.text is not None:
            raise ValueError(
                f"router.replay is {self.router.replay}, and images are asked for by texts, which are their owners':"
                " leave it out, or condition on classes"
            )
        if 0 < self.router.replay < self.partition.num_clusters:
            raise ValueError(
                f"router.replay ({self.router.replay}) is less than an image for each of"
                f" {self.partition.num_clusters} experts: raise it"
            )
        return self

    @model_validator(mode="after")
    def _clip_has_texts(self) -> Self:
        if self.evaluate.clip is not None and self.data.text is None:
            raise ValueError("evaluate.clip compares images with texts, and data.text is none: leave it out")
        return self

    @model_validator(mode="after")
    def _pixels_have_components(self) -> Self:
        values, dim = math.prod(self.data.pixel_shape), self.embedder.dim
        if self.embedder.kind == "pixels" and not self.partition.given and dim > values:
            raise ValueError(f"embedder.dim is {dim}, and an image has {values} values: set it to {values} or less")
        return self

    @model_validator(mode="after")
    def _classes_make_clusters(self) -> Self:
        if self.partition.method == "label" and len(self.data.class_names) < self.partition.num_clusters:
            held = f"{len(self.data.class_names)} classes" if self.data.class_names else "texts"
            raise ValueError(
                f"partition.method label makes {self.partition.num_clusters} clusters of classes, and data has {held}:"
                " lower partition.num_clusters, or choose another method"
            )
        return self

    @model_validator(mode="after")
    def _denoisers_fit_flow_and_data(self) -> Self:
        for name, model in (("expert", self.expert.model), ("student", self.student.model)):
            if model is not None and (misfit := model.misfit(self.flow, self.data)):
                raise ValueError(f"{name}.model{misfit}")
        return self


def _changed(changes: ExpertChanges, part: str, default: StrictModel) -> dict[str, Any]:
    return changes.change(part, default.model_dump())


def _require_strategy(field: str, strategy: str, num_clusters: int) -> None:
    try:
        kind, _ = parse_strategy_name(strategy, num_clusters)
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from None
    if kind == "oracle":
        raise ValueError(f"{field}: 'oracle' needs clusters that are known beforehand: use once")


def invalid_fields(error: ValidationError, model: type[BaseModel] | None = None, where: str = "") -> str:
    """The first few findings of pydantic as `field: what is wrong`, joined by `; `. Unknown keys come first.

    `model`: of which the fields are, for a guess which one a mistyped one was to be. `where`: the field that holds it.
    """
    findings = []
    for finding in sorted(error.errors(), key=lambda each: each["type"] != "extra_forbidden")[:3]:
        field = ".".join(str(part) for part in finding["loc"])
        given = "" if finding["type"] in ("missing", "value_error") else f", got {finding['input']!r:.60}"
        message = finding["msg"].removeprefix("Value error, ")
        if finding["type"] == "extra_forbidden":
            message, given = "unknown key" + (meant_field(field, model) if model else ""), ""
        if finding["type"] == "string_unicode":
            message = "is not UTF-8; rename it"
        if finding["type"] == "literal_error" and isinstance(finding["input"], str):
            given += meant(finding["input"], re.findall(r"'([^']*)'", finding["ctx"]["expected"]))
        if finding["loc"][-1:] == ("[key]",):
            field, message, given = field.removesuffix(".[key]"), "is no cluster's number", ""
        findings.append(": ".join(filter(None, (".".join(filter(None, (where, field))), f"{message}{given}"))))
    return one_line("; ".join(findings))


def parse_config(fields: Any, where: str) -> RunConfig:
    """RunConfig of plain JSON or YAML data; `where` names its origin in the ConfigError."""
    try:
        return RunConfig.model_validate(fields)
    except ValidationError as error:
        raise ConfigError(f"{one_line(where)}: {invalid_fields(error, RunConfig)}") from None
