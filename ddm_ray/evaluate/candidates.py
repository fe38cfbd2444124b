"""Candidates of an evaluation: the mixture under each strategy, and the run's dense models.

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
from ddm_ray.run.graph import ROUTER, Artifact, shards_of, trained_of
from ddm_ray.run.run import Run
from ddm_ray.sampling.request import SampleRequest, SampleResult
from ddm_ray.sampling.run_models import ModelKind, Models, OnLoaded, load_models, row_networks, settings_of

DENSE: tuple[ModelKind, ...] = ("monolith", "student")
"""Dense models, in the order in which tables show them."""
DECODED_AT_ONCE = 8

Decode = Callable[[Tensor], Tensor]
"""Maps data (N, C, H, W) to images (N, C, P, P), roughly in [-1, 1], on the CPU."""


@dataclass(frozen=True)
class Candidate:
    """A line of the table: models under settings. `cost`, in experts per velocity, is its weight in the progress."""

    name: str
    models: Models
    settings: SamplingSettings
    cost: int

    def sample(self, request: SampleRequest, on_share: Callable[[float], object] | None = None) -> SampleResult:
        """The request's images under the candidate's settings. `on_share` is called with the share of steps done."""
        steps = self.settings.steps

        def on_step(step: int, t: float, x_BCHW: Tensor) -> None:
            if on_share:
                on_share((step + 1) / steps)

        return self.models.sample(self.request(request), on_step)

    def request(self, request: SampleRequest) -> SampleRequest:
        """The request for this candidate. A single network gets its index directly: no table or router is needed."""
        alone = self.models.info.num_experts == 1
        cluster_B = torch.zeros(len(request.seeds), dtype=torch.int64) if alone else None
        return replace(request, settings=self.settings, cluster_B=cluster_B)


@dataclass(frozen=True)
class Lineup:
    """The mixture, the dense models by kind, the candidates, and a text per missing artifact on what isn't measured.

    `milestones`: weights of jobs that are still training, which stand for finished ones.
    """

    mixture: Models
    denses: dict[ModelKind, Models]
    candidates: tuple[Candidate, ...]
    missing: dict[str, str]
    milestones: Mapping[Artifact, Weights]

    @classmethod
    def of(
        cls,
        run: Run,
        trained: Collection[str],
        old: Mapping[str, str],
        device: str,
        milestones: Mapping[Artifact, Weights],
        on_loaded: OnLoaded | None = None,
    ) -> Self:
        """Load those of the `trained` artifacts and `milestones` that are candidates.

        `trained`: artifacts that existed when the evaluation began. `old`: the result of `outdated`. `on_loaded` is
        called for the mixture's networks. Raises MissingArtifact, CorruptArtifact, DriftError.
        """
        mixture = load_models(run, "mixture", device, milestones=milestones, on_loaded=on_loaded)
        if ROUTER not in trained and ROUTER not in milestones:
            mixture = replace(mixture, router=None)
        kinds = [kind for kind in DENSE if kind in trained or kind in milestones]
        denses = {kind: load_models(run, kind, device, milestones=milestones) for kind in kinds}
        null_text = null_text_of(run, shards_of(run.config)[0])
        mixture, denses = _with_null(mixture, null_text), {k: _with_null(each, null_text) for k, each in denses.items()}
        missing = _missing(run, mixture, denses) | dict(old)
        return cls(mixture, denses, _candidates(run, mixture, denses), missing, milestones)


def _with_null(models: Models, null_text: Text | None) -> Models:
    return replace(models, info=replace(models.info, null_text=null_text))


def newest_milestones(run: Run, at: int | None = None) -> dict[Artifact, Weights]:
    """The newest published weights of every job that is still training.

    `at`: for all jobs, finished ones too, the newest weights after at most this many steps. Raises MissingArtifact
    for an expert without weights that early, DriftError, CorruptArtifact.
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
    """A text on each finished model, experts apart, that has no weights after at most `at` steps."""
    if at is None:
        return {}
    others = [artifact for artifact in trained_of(run.config) if artifact.kind != "expert"]
    every = published(run, [artifact for artifact in others if run.manifest(artifact, accepted=True)])
    late = [artifact for artifact, own in every.items() if all(each.step > at for each in own)]
    return {str(artifact): f"{artifact} (there are no weights of it after {at} steps or fewer)" for artifact in late}


def outdated(run: Run) -> dict[str, str]:
    """A text on each dense model that doesn't match this run's configuration or inputs, such as other experts."""
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
    """True if a strategy needs the router: unless it draws once, and a table of classes gives the probabilities."""
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
            reason = "it hasn't been accepted"
        lacks[kind] = f"{kind} ({reason})"
    return lacks


def decoder(run: Run, device: str) -> Decode:
    """The run's map from data to images: the identity for pixels, the autoencoder's decoder for latents.

    Raises ConfigError.
    """
    config = run.config.data.latents
    if config is None:
        return lambda data_NCHW: data_NCHW
    from ddm_ray.models.latents import Latents  # imports diffusers, which runs on pixels don't need

    latents = Latents.from_config(config, row_networks(run).get("autoencoder")).to(device)

    def decode(data_NCHW: Tensor) -> Tensor:
        return torch.cat([latents.decode(part.to(device)).cpu() for part in data_NCHW.split(DECODED_AT_ONCE)])

    return decode
