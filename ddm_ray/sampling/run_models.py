"""From a run's finished artifacts to models that sample: verified weights, and the prior over experts.

Shapes: B images, CHW image, S steps, K experts, C classes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

from ddm_ray.config import SamplingSettings, TrainConfig
from ddm_ray.core.flow import Flow
from ddm_ray.core.snr import MatchedRouter, velocity_field
from ddm_ray.core.transfer import frozen_dtype
from ddm_ray.errors import ConfigError, CorruptArtifact, DriftError, SamplingError
from ddm_ray.jobs.published import Weights, all_finished
from ddm_ray.models import weights
from ddm_ray.models.network import Network
from ddm_ray.models.router import Router
from ddm_ray.models.spec import spec_of
from ddm_ray.parsing import parse_object
from ddm_ray.run.graph import PARTITION, ROUTER, Artifact
from ddm_ray.run.info import EvaluationInfo, PartitionInfo
from ddm_ray.run.inputs import beginning_of
from ddm_ray.run.inventory import evaluations
from ddm_ray.run.manifest import Identity, drift
from ddm_ray.run.run import Run
from ddm_ray.sampling import driver
from ddm_ray.sampling.batches import by_expert, joined
from ddm_ray.sampling.offload import Offload, Offloaded, resident_experts
from ddm_ray.sampling.request import MixtureInfo, SampleRequest, SampleResult, strategy_of
from ddm_ray.sampling.shared_base import sharing
from ddm_ray.spelling import printable

ModelKind = Literal["mixture", "monolith", "student"]
"""Words for what a run can sample with: its mixture, or a network that was trained on all rows."""

NETWORK = "model.json", "ema.safetensors"
"""Names of the files of published weights: what a network is, and its tensors."""
SPEC_BYTES = 2**20
DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SamplingPrecision = Literal["fp32", "bf16", "fp16"] | torch.dtype
"""Precision in which networks sample: a word of DTYPES, or the dtype that it names."""
OnLoaded = Callable[[int, int], object]
"""Called after each network is loaded, with the number of loaded ones and the number of all."""


@dataclass(frozen=True)
class Models:
    """All that sampling calls. A monolith is a mixture of one expert without a router."""

    info: MixtureInfo
    experts: driver.Experts = field(repr=False)
    router: nn.Module | None = field(repr=False)
    device: str = "cpu"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the experts' weights; float32 where no network says another."""
        experts = self.experts
        if isinstance(experts, Offloaded):
            return experts.dtype
        networks = [*(experts[k] for k in range(len(experts))), self.router]
        parameters = (
            tensor for network in networks if isinstance(network, nn.Module) for tensor in network.parameters()
        )
        return next((tensor.dtype for tensor in parameters), torch.float32)

    def sample(
        self,
        request: SampleRequest,
        on_step: driver.OnStep | None = None,
        interrupted: driver.Interrupted | None = None,
    ) -> SampleResult:
        """The request's images, all in one batch; expert by expert where these are offloaded and held.

        `on_step` is then called for each expert's images in turn. `interrupted`: see `driver.sample`.
        """
        held = strategy_of(request.settings, self.info.num_experts).when == "start"
        if isinstance(self.experts, Offloaded) and held:
            return self._expert_by_expert(request, self.experts, on_step, interrupted)
        return driver.sample(request, self.info, self.experts, self.router, self.device, on_step, interrupted)

    def _expert_by_expert(
        self,
        request: SampleRequest,
        experts: Offloaded,
        on_step: driver.OnStep | None,
        interrupted: driver.Interrupted | None,
    ) -> SampleResult:
        info = driver.with_available(self.info, experts)
        expert_B, num_router_rows = driver.drawn_experts(request, info, self.router, self.device)
        requests, order = by_expert(request, expert_B)
        parts, drawn = [], list(requests)
        for expert, following in zip(drawn, [*drawn[1:], None], strict=True):
            experts.prefetch(expert)
            if following is not None:
                experts.prefetch(following)
            sampled = driver.sample(requests[expert], info, experts, self.router, self.device, on_step, interrupted)
            parts.append(sampled)
        return replace(joined(parts, order), num_router_rows=num_router_rows)


def load_trained(run: Run, artifact: Artifact, device: str = "cpu", precision: SamplingPrecision = "fp32") -> nn.Module:
    """The EMA weights of a finished training job (experts/003, router, monolith), in eval mode and this precision.

    Raises MissingArtifact if the job isn't finished, CorruptArtifact if a byte was altered.
    """
    return load_weights(run, Weights.finished(run, artifact), device, precision)


def load_weights(
    run: Run,
    published: Weights,
    device: str = "cpu",
    precision: SamplingPrecision = "fp32",
    base: Network | None = None,
) -> nn.Module:
    """The network of published weights as sampling calls it (`matched`). Raises as `load_network`."""
    flow = Flow(**_spec_of(run, published).get("flow", {}))
    return matched(load_network(run, published, device, precision, base), flow)


def load_network(
    run: Run,
    published: Weights,
    device: str = "cpu",
    precision: SamplingPrecision = "fp32",
    base: Network | None = None,
) -> Network:
    """The network of published weights as it was trained: it predicts what its flow says, on that path.

    In eval mode and this precision. `base`: that of an adapter (`load_base`), there and in this precision already; None
    reads it. Raises CorruptArtifact, DriftError, MissingArtifact.
    """
    spec, dtype = _spec_of(run, published), dtype_of(precision)
    described, tensors = published.read(run, network_bytes(spec))
    base = base or load_base(run, published.artifact, device, dtype)
    where = f"{run.url}/{published.artifact}/{published.prefix}"
    return parse_network(described, tensors, where, spec, base)[0].to(device, dtype)


def load_base(
    run: Run, job: Artifact, device: torch.device | str = "cpu", precision: SamplingPrecision = "fp32"
) -> Network | None:
    """The frozen network that a job's adapter is trained beside, for all adapters to share; None for whole networks.

    Raises MissingArtifact, CorruptArtifact if a byte was altered.
    """
    spec = spec_of(run.config, job.kind, job.cluster)
    if "adapter" not in spec:
        return None
    beginning = beginning_of(run.config, job)[0]
    manifest = run.require(beginning)
    described, tensors = (run.read(beginning, name, manifest) for name in NETWORK)
    network = parse_network(described, tensors, f"{run.url}/{beginning}", weights.base_spec(spec))[0]
    return network.to(device, dtype_of(precision)).requires_grad_(False)


def _spec_of(run: Run, published: Weights) -> dict[str, Any]:
    return spec_of(run.config, published.artifact.kind, published.artifact.cluster)


def network_bytes(spec: dict[str, Any]) -> dict[str, int]:
    """Bytes of each of the files NETWORK at most, of a network of this spec."""
    return dict(zip(NETWORK, (SPEC_BYTES, weights.most_bytes(spec)), strict=True))


def parse_network(
    described: bytes, tensors: bytes, where: str, spec: dict[str, Any], base: Network | None = None
) -> tuple[Network, Flow]:
    """The network in the bytes of the files NETWORK of published weights, which has to be that of a spec.

    `base`: the network that an adapter was trained beside. Raises CorruptArtifact naming `where`, and what differs,
    before anything is built.
    """
    try:
        actual = parse_object(described)
    except ValueError:
        raise CorruptArtifact(f"{where}/model.json: not JSON; train it again") from None
    if lines := drift(Identity(weights.complete_spec(spec)), Identity(weights.complete_spec(actual))):
        raise CorruptArtifact(f"{where}/model.json: isn't the run's network: {printable(lines[0], 200)}")
    try:
        return weights.load_model(spec, tensors, base), Flow(**spec.get("flow", {}))
    except (CorruptArtifact, ConfigError, TypeError) as error:
        raise CorruptArtifact(f"{where}: {error}") from None


def dtype_of(precision: Any) -> torch.dtype:
    """The dtype of weights and activations, by its word or itself. SamplingError for another."""
    if isinstance(precision, torch.dtype) and precision in DTYPES.values():
        return precision
    if not isinstance(precision, str) or precision not in DTYPES:
        known = ", ".join(f"{word} ({dtype})" for word, dtype in DTYPES.items())
        raise SamplingError(f"unknown precision {precision!r:.60}: use one of {known}")
    return DTYPES[precision]


def matched(model: nn.Module, flow: Flow) -> nn.Module:
    """The model as sampling calls it: a velocity on the linear path, or a router there."""
    if isinstance(model, Router):
        return model if flow.path == "linear" else MatchedRouter(model, flow.path)
    return velocity_field(model, flow)


def settings_of(run: Run, kind: ModelKind) -> SamplingSettings:
    """The run's settings for this; a student with a guided teacher needs no guidance of its own."""
    guided = kind == "student" and run.config.student.guided
    return run.config.sample.changed(guidance_scale=1.0) if guided else run.config.sample


def sampling_settings(run: Run, kind: ModelKind = "mixture") -> SamplingSettings:
    """The settings of `settings_of`, and where they name no strategy the one that the run's evaluation found best.

    Any finished evaluation that measured all strategies will do. One that lacked the router which is there now, one of
    other experts or of their milestones, or one that can't be read doesn't count; without any it is `once`.
    """
    settings = settings_of(run, kind)
    if settings.strategy is not None:
        return settings
    for artifact in evaluations(run):
        try:
            manifest = run.finished(artifact)
        except (CorruptArtifact, DriftError):
            continue  # `status` tells of it; models don't depend on a report
        inputs = manifest.identity.inputs if manifest else {}
        if (
            manifest
            and {*run.experts} <= {*inputs}
            and (ROUTER in inputs or run.manifest(ROUTER, accepted=True) is None)
        ):
            return settings.changed(strategy=EvaluationInfo.of(manifest).best_strategy)
    return settings.changed(strategy="once")


def mixture_info(run: Run) -> MixtureInfo:
    """Shape and prior p(k | class) of the run's mixture, from its partition's counts of training rows."""
    info = PartitionInfo.of(run.require(PARTITION))
    counts_CK = torch.tensor([info.rows_K], dtype=torch.float64)
    if run.config.data.num_classes is not None:
        counts_CK = torch.cat([torch.tensor(info.counts_CK, dtype=torch.float64), counts_CK])
    mixture = MixtureInfo.from_counts(counts_CK, run.config.data.shape)
    return replace(
        mixture,
        num_classes=run.config.data.num_classes,
        trained_null=run.config.experts_know_null,
        numbers=run.config.partition.numbers,
    )


def row_networks(run: Run) -> dict[str, str]:
    """Fingerprints of the networks that made the run's rows, by their parts, as far as its partition knows them."""
    partition = run.manifest(PARTITION)
    return PartitionInfo.of(partition).networks if partition else {}


def monolith_info(run: Run, kind: ModelKind = "monolith") -> MixtureInfo:
    """The monolith or the student as a mixture of one: K = 1."""
    return _of_one(run, run.config.student_train if kind == "student" else run.config.monolith.train)


def expert_info(run: Run, cluster: int) -> MixtureInfo:
    """One cluster's expert by itself, as a mixture of one: K = 1."""
    return replace(_of_one(run, run.config.expert_of(cluster).train), numbers=(cluster,))


def _of_one(run: Run, train: TrainConfig) -> MixtureInfo:
    num_classes = run.config.data.num_classes
    prior_CK = torch.ones((num_classes or 0) + 1, 1, dtype=torch.float64)
    return MixtureInfo(1, run.config.data.shape, num_classes, prior_CK, trained_null=train.condition_dropout > 0)


def load_models(
    run: Run,
    kind: ModelKind = "mixture",
    device: str = "cpu",
    offload: Offload | None = None,
    precision: SamplingPrecision | None = None,
    milestones: Mapping[Artifact, Weights] | None = None,
    on_loaded: OnLoaded | None = None,
) -> Models:
    """All experts, and the router if it is finished; or one of EXTRAS. Raises MissingArtifact, CorruptArtifact.

    `offload`: see `resident_experts`; weights that come from files are verified each time. `precision`; None: see
    `frozen_dtype`. `milestones`: weights of artifacts that are taken in place of finished ones. `on_loaded` isn't
    called with `offload`.
    """
    earlier, dtype = milestones or {}, frozen_dtype(device) if precision is None else dtype_of(precision)
    loaded, base = 0, None

    def load(artifact: Artifact, where: str) -> nn.Module:
        nonlocal loaded
        network = load_weights(run, weights.get(artifact) or Weights.finished(run, artifact), where, dtype, base)
        loaded += 1
        if on_loaded and offload is None:  # offloaded experts are loaded again and again
            on_loaded(loaded, total)
        return network

    total, weights = 1, earlier
    if kind != "mixture":
        return Models(monolith_info(run, kind), (load(Artifact(kind), device),), None, device)
    # All at first, since loading one after the other takes minutes.
    weights = all_finished(run, [artifact for artifact in run.experts if artifact not in earlier]) | dict(earlier)
    has_router = bool(ROUTER in earlier or run.finished(ROUTER, accepted=True))
    total = len(run.experts) + has_router
    base = load_base(run, run.experts[0], "cpu" if offload == "host" else device, dtype)
    experts = resident_experts(
        lambda expert, where: load(run.experts[expert], where),
        [True] * len(run.experts),
        offload,
        device,
        dtype,
    )
    router = load(ROUTER, device) if has_router else None
    return Models(mixture_info(run), experts if offload else sharing(experts), router, device)
