"""From a run's finished artifacts to models that sample: verified weights, and the prior over experts.

Shapes: B images, CHW image, S steps, K experts, C classes.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from ddm_ray.errors import CorruptArtifact
from ddm_ray.models import weights
from ddm_ray.sampling import driver
from ddm_ray.sampling.trajectory import MixtureInfo, Sampled, SampleRequest
from ddm_ray.storage.run import MONOLITH, PARTITION, ROUTER, Run


@dataclass(frozen=True)
class Models:
    """All that sampling calls. A monolith is a mixture of one expert without a router."""

    info: MixtureInfo
    experts: tuple[nn.Module, ...]
    router: nn.Module | None
    device: str = "cpu"

    def sample(self, request: SampleRequest) -> Sampled:
        """The request's images, all in one batch."""
        return driver.sample(request, self.info, self.experts, self.router, self.device)


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
    except CorruptArtifact as error:
        raise CorruptArtifact(f"{where}: {error}") from None
    return model.to(device)


def mixture_info(run: Run) -> MixtureInfo:
    """Shape and prior p(k | class) of the run's mixture, from its partition's counts of training rows."""
    counts_CK = torch.tensor(run.require(PARTITION).info["counts_CK"], dtype=torch.float64)
    return MixtureInfo.from_counts(torch.cat([counts_CK, counts_CK.sum(0, keepdim=True)]), run.config.data.shape)


def monolith_info(run: Run) -> MixtureInfo:
    """The monolith, or any one expert by itself, as a mixture of one: K = 1."""
    prior_CK = torch.ones(run.config.data.num_classes + 1, 1, dtype=torch.float64)
    return MixtureInfo(1, run.config.data.shape, run.config.data.num_classes, prior_CK)


def load_models(run: Run, kind: Literal["mixture", "monolith"] = "mixture", device: str = "cpu") -> Models:
    """All experts and the router, or the monolith. Raises MissingArtifact, CorruptArtifact."""
    if kind == "monolith":
        return Models(monolith_info(run), (load_model(run, MONOLITH, device),), None, device)
    experts = tuple(load_model(run, artifact, device) for artifact in run.experts)
    return Models(mixture_info(run), experts, load_model(run, ROUTER, device), device)


def batches(request: SampleRequest, batch_size: int) -> list[SampleRequest]:
    """The same images as requests of at most `batch_size` each, in order."""
    starts = range(0, len(request.seeds), batch_size)
    return [
        replace(request, seeds=request.seeds[i : i + batch_size], label_B=request.label_B[i : i + batch_size])
        for i in starts
    ]


def joined(parts: Sequence[Sampled]) -> Sampled:
    """One result of the results of `batches`."""
    return Sampled(
        torch.cat([part.images_BCHW for part in parts]),
        torch.cat([part.experts_SB for part in parts], dim=1),
        sum(part.num_expert_rows for part in parts),
        sum(part.num_router_rows for part in parts),
    )
