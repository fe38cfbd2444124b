"""From a run's finished artifacts to models that sample: verified weights, and the prior over experts.

Shapes: B images, CHW image, S steps, K experts, C classes.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from ddm_ray.core.flow import Flow
from ddm_ray.core.matching import MatchedRouter, velocity_field
from ddm_ray.core.routing import parse_strategy
from ddm_ray.errors import ConfigError, CorruptArtifact
from ddm_ray.models import weights
from ddm_ray.models.router import Router
from ddm_ray.sampling import driver
from ddm_ray.sampling.request import MixtureInfo, Sampled, SampleRequest
from ddm_ray.sampling.residence import Offloaded, from_host
from ddm_ray.sampling.trajectory import OnStep
from ddm_ray.storage.run import MONOLITH, PARTITION, ROUTER, Run


@dataclass(frozen=True)
class Models:
    """All that sampling calls. A monolith is a mixture of one expert without a router."""

    info: MixtureInfo
    experts: driver.Experts
    router: nn.Module | None
    device: str = "cpu"

    def sample(self, request: SampleRequest, on_step: OnStep | None = None) -> Sampled:
        """The request's images, all in one batch; expert by expert where these are offloaded and held.

        `on_step` is then told of each expert's images in turn.
        """
        held = parse_strategy(request.strategy, self.info.num_experts).when == "start"
        if isinstance(self.experts, Offloaded) and held:
            return self._expert_by_expert(request, self.experts, on_step)
        return driver.sample(request, self.info, self.experts, self.router, self.device, on_step)

    def _expert_by_expert(self, request: SampleRequest, experts: Offloaded, on_step: OnStep | None) -> Sampled:
        info = driver.living(self.info, experts)
        expert_B, num_router_rows = driver.drawn_experts(request, info, self.router, self.device)
        drawn = expert_B.unique().tolist()
        rows, parts = [], []
        for expert, following in zip(drawn, [*drawn[1:], None], strict=True):
            experts.prefetch(expert)
            if following is not None:
                experts.prefetch(following)
            rows.append(torch.nonzero(expert_B == expert)[:, 0])
            part = replace(request, strategy="oracle", cluster_B=expert_B).rows(rows[-1])
            parts.append(driver.sample(part, info, experts, self.router, self.device, on_step))
        return replace(joined(parts, torch.cat(rows).argsort()), num_router_rows=num_router_rows)


def load_model(run: Run, artifact: str, device: str = "cpu") -> nn.Module:
    """The EMA weights of a finished training job (experts/003, router, monolith), in eval mode.

    Raises MissingArtifact if the job isn't finished, CorruptArtifact if a byte was altered.
    """
    manifest = run.require(artifact)
    prefix = manifest.info["weights"]
    where = f"{run.url}/{artifact}/{prefix}"
    try:
        spec = json.loads(run.read(artifact, f"{prefix}/model.json", manifest))
    except ValueError:
        raise CorruptArtifact(f"{where}/model.json: not JSON; train {artifact} again") from None
    tensors = run.read(artifact, f"{prefix}/ema.safetensors", manifest)
    try:
        model = weights.load(spec, tensors)
        flow = Flow(**spec.get("flow", {}))
    except (CorruptArtifact, ConfigError, TypeError) as error:
        raise CorruptArtifact(f"{where}: {error}") from None
    return matched(model, flow).to(device)


def matched(model: nn.Module, flow: Flow) -> nn.Module:
    """The model as sampling calls it: a velocity on the linear path, or a router there."""
    if isinstance(model, Router):
        return model if flow.path == "linear" else MatchedRouter(model, flow.path)
    return velocity_field(model, flow)


def mixture_info(run: Run) -> MixtureInfo:
    """Shape and prior p(k | class) of the run's mixture, from its partition's counts of training rows."""
    info = run.require(PARTITION).info
    counts_CK = torch.tensor([info["rows_K"]], dtype=torch.float64)
    if run.config.data.num_classes is not None:
        counts_CK = torch.cat([torch.tensor(info["counts_CK"], dtype=torch.float64), counts_CK])
    return _as_configured(MixtureInfo.from_counts(counts_CK, run.config.data.shape), run)


def monolith_info(run: Run) -> MixtureInfo:
    """The monolith, or any one expert by itself, as a mixture of one: K = 1."""
    num_classes = run.config.data.num_classes
    prior_CK = torch.ones((num_classes or 0) + 1, 1, dtype=torch.float64)
    return _as_configured(MixtureInfo(1, run.config.data.shape, num_classes, prior_CK), run)


def _as_configured(info: MixtureInfo, run: Run) -> MixtureInfo:
    config = run.config
    return replace(
        info,
        num_classes=config.data.num_classes,
        trained_null=config.expert.train.condition_dropout > 0,
        router_temperature=config.sample.router_temperature,
    )


def load_models(
    run: Run,
    kind: Literal["mixture", "monolith"] = "mixture",
    device: str = "cpu",
    offload: Literal["disk", "host"] | None = None,
) -> Models:
    """All experts, and the router if it is finished; or the monolith. Raises MissingArtifact, CorruptArtifact.

    `offload` keeps two experts on the device, the others in files (verified each time) or in host memory.
    """
    if kind == "monolith":
        return Models(monolith_info(run), (load_model(run, MONOLITH, device),), None, device)
    if offload == "disk":
        for artifact in run.experts:
            run.require(artifact)
        fetch: Callable[[int], driver.Field] = lambda k: load_model(run, run.experts[k], device)  # noqa: E731
    else:
        loaded = [load_model(run, artifact, "cpu" if offload else device) for artifact in run.experts]
        fetch = from_host(loaded, device)
    experts = Offloaded(fetch, [True] * len(run.experts)) if offload else tuple(loaded)
    router = load_model(run, ROUTER, device) if run.finished(ROUTER) else None
    return Models(mixture_info(run), experts, router, device)


def batches(request: SampleRequest, batch_size: int) -> list[SampleRequest]:
    """The same images as requests of at most `batch_size` each, in order."""
    return [request.rows(slice(i, i + batch_size)) for i in range(0, len(request.seeds), batch_size)]


def joined(parts: Sequence[Sampled], order: Tensor | None = None) -> Sampled:
    """One result of the results of parts of a request, its images in `order` (int64; None: as they come)."""
    images_BCHW = torch.cat([part.images_BCHW for part in parts])
    routing_SBK = torch.cat([part.routing_SBK for part in parts], dim=1)
    return Sampled(
        images_BCHW if order is None else images_BCHW[order],
        routing_SBK if order is None else routing_SBK[:, order],
        sum(part.num_expert_rows for part in parts),
        sum(part.num_router_rows for part in parts),
    )
