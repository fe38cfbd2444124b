"""Candidates of an evaluation: the mixture by each strategy, and the dense models that there are.

Shapes: N rows, CHW data, P pixels of a side.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from ddm_ray.config import SamplingSettings
from ddm_ray.core.condition import Text
from ddm_ray.core.routing import parse_strategy
from ddm_ray.data.loading.shard_files import null_text_of
from ddm_ray.errors import DriftError, MissingArtifact
from ddm_ray.jobs.published import Weights, published
from ddm_ray.run.graph import ROUTER, Artifact, shard, trained_of
from ddm_ray.run.run import Run
from ddm_ray.sampling.request import SampleRequest, SampleResult
from ddm_ray.sampling.run_models import ModelKind, Models, load_models, row_networks, settings_of

DENSE: tuple[ModelKind, ...] = ("monolith", "student")
"""Dense models, in the order in which they are shown."""
DECODED_AT_ONCE = 8

Decode = Callable[[Tensor], Tensor]
"""Images (N, C, P, P), about [-1, 1], of data (N, C, H, W), on the CPU."""


@dataclass(frozen=True)
class Candidate:
    """Models under settings, which make a line of the table; `cost`, in experts per velocity, weighs its progress."""

    name: str
    models: Models
    settings: SamplingSettings
    cost: int

    def sample(self, request: SampleRequest) -> SampleResult:
        """The request's images, under this one's settings."""
        return self.models.sample(self.request(request))

    def request(self, request: SampleRequest) -> SampleRequest:
        """The request as this one is asked: a single network is known beforehand, no table or router says which."""
        alone = self.models.info.num_experts == 1
        cluster_B = torch.zeros(len(request.seeds), dtype=torch.int64) if alone else None
        return replace(request, settings=self.settings, cluster_B=cluster_B)


@dataclass(frozen=True)
class Lineup:
    """The mixture, dense models by their kind, the candidates, and words on what is missing by the artifact lacked."""

    mixture: Models
    denses: dict[ModelKind, Models]
    candidates: tuple[Candidate, ...]
    missing: dict[str, str]

    @classmethod
    def of(
        cls,
        run: Run,
        trained: Collection[str],
        old: Mapping[str, str],
        device: str,
        milestones: Mapping[Artifact, Weights] | None = None,
    ) -> Self:
        """Load what is among `trained`, the artifacts that there were when the evaluation was begun, and `milestones`.

        `old`: `outdated`. Raises MissingArtifact, CorruptArtifact, DriftError.
        """
        earlier = milestones or {}
        mixture = load_models(run, "mixture", device, milestones=earlier)
        if ROUTER not in trained and ROUTER not in earlier:
            mixture = replace(mixture, router=None)
        kinds = [kind for kind in DENSE if kind in trained or kind in earlier]
        denses = {kind: load_models(run, kind, device, milestones=earlier) for kind in kinds}
        null_text = null_text_of(run, shard(0))
        mixture, denses = _with_null(mixture, null_text), {k: _with_null(each, null_text) for k, each in denses.items()}
        return cls(mixture, denses, _candidates(run, mixture, denses), _missing(run, mixture, denses) | dict(old))


def _with_null(models: Models, null_text: Text | None) -> Models:
    return replace(models, info=replace(models.info, null_text=null_text))


def newest_milestones(run: Run, at: int | None = None) -> dict[Artifact, Weights]:
    """The newest weights of all that still trains, of those that have published any; or those at a step, of all.

    `at`: the most steps that they have had. Raises MissingArtifact for an expert that has published none so early,
    DriftError, CorruptArtifact.
    """
    jobs = [
        artifact for artifact in trained_of(run.config) if at is not None or not run.manifest(artifact, accepted=True)
    ]
    milestones: dict[Artifact, Weights] = {}
    for artifact, every in published(run, jobs).items():
        fitting = [each for each in every if at is None or each.step <= at]
        if not fitting and at is not None and artifact.kind == "expert":
            raise MissingArtifact(f"{run.url}: there are no weights of {artifact} after {at} steps or fewer")
        if fitting and not (newest := max(fitting, key=lambda each: each.step)).final:
            milestones[artifact] = newest
    return milestones


def later_than(run: Run, at: int | None) -> dict[str, str]:
    """Words on what isn't an expert, is finished, and has no weights of so few steps."""
    if at is None:
        return {}
    others = [artifact for artifact in trained_of(run.config) if artifact.kind != "expert"]
    every = published(run, [artifact for artifact in others if run.manifest(artifact, accepted=True)])
    late = [artifact for artifact, own in every.items() if all(each.step > at for each in own)]
    return {str(artifact): f"{artifact} (there are no weights of it after {at} steps or fewer)" for artifact in late}


def outdated(run: Run) -> dict[str, str]:
    """Words on the dense models that were made otherwise than this run wants them, as by other experts."""
    words: dict[str, str] = {}
    for kind in DENSE:
        try:
            run.finished(Artifact(kind), accepted=True)
        except DriftError as error:
            words[kind] = f"{kind} ({error.message})"
    return words


def _candidates(run: Run, mixture: Models, denses: dict[ModelKind, Models]) -> tuple[Candidate, ...]:
    candidates = [
        Candidate(kind, models, settings_of(run, kind).changed(strategy="oracle"), 1) for kind, models in denses.items()
    ]
    for strategy in run.config.evaluate.strategies:
        chosen = parse_strategy(strategy, mixture.info.num_experts)
        if mixture.router is not None or not _asks_router(strategy, mixture):
            cost = {"start": 1, "step": 2, "velocity": mixture.info.num_experts}[chosen.when]
            candidates.append(Candidate(strategy, mixture, run.config.sample.changed(strategy=strategy), cost))
    return tuple(candidates)


def _asks_router(strategy: str, mixture: Models) -> bool:
    """True for all that isn't drawn once; and for that, too, where conditions are texts, which no table has."""
    parsed = parse_strategy(strategy, mixture.info.num_experts)
    return parsed.when != "start" or mixture.info.num_classes is None


def _missing(run: Run, mixture: Models, denses: Collection[str]) -> dict[str, str]:
    routed = [
        strategy
        for strategy in run.config.evaluate.strategies
        if mixture.router is None and _asks_router(strategy, mixture)
    ]
    lacks: dict[str, str] = {ROUTER: f"{', '.join(routed)} (there is no trained router)"} if routed else {}
    made = [kind for kind in DENSE if Artifact(kind) in trained_of(run.config)]
    for kind in (kind for kind in made if kind not in denses):
        counts = run.manifest(Artifact(kind), accepted=True) is not None
        reason = "it was finished after this had begun" if counts else "it isn't trained"
        if not counts and run.manifest(Artifact(kind)):
            reason = "nobody has accepted it"
        lacks[kind] = f"{kind} ({reason})"
    return lacks


def decoder(run: Run, device: str) -> Decode:
    """The run's way from data to images: none for pixels, its autoencoder for latents. Raises ConfigError."""
    config = run.config.data.latents
    if config is None:
        return lambda data_NCHW: data_NCHW
    from ddm_ray.models.latents import Latents  # diffusers, where it is needed

    latents = Latents.from_config(config, row_networks(run).get("autoencoder")).to(device)

    def decode(data_NCHW: Tensor) -> Tensor:
        return torch.cat([latents.decode(part.to(device)).cpu() for part in data_NCHW.split(DECODED_AT_ONCE)])

    return decode
