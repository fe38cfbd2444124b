"""Versions: the published weights that are served, the newest of a run or those that a file pins. No Ray.

Shapes: K experts.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from ddm_ray.errors import ConfigError, CorruptArtifact, DriftError, MissingArtifact, RunError, ServeError
from ddm_ray.jobs.published import Weights, published
from ddm_ray.remedies import Accept
from ddm_ray.run.graph import EXTRAS, ROUTER, Artifact, trained_of
from ddm_ray.run.run import Run
from ddm_ray.serve.engine.pins import Pins, read_pins, require_fits

LOG = logging.getLogger("ray.serve")


class Pair(NamedTuple):
    """Weights of one expert and of the router, which a replica of the expert needs, and the URL of the run served."""

    expert: Weights | None
    router: Weights | None
    run: str


@dataclass(frozen=True)
class Version:
    """The weights that a request is sampled with, of each expert and of the router; None: none are published yet.

    `run`: the one that is served. `clusters`: the experts' numbers; none: 0 to K - 1.
    """

    run: Run
    experts: tuple[Weights | None, ...]
    router: Weights | None
    clusters: tuple[int, ...] = ()

    @classmethod
    def of_pair(cls, run: Run, expert: int, num_experts: int, weights: Pair) -> "Version":
        """A version with only the expert at this position."""
        return cls(
            run, tuple(weights.expert if each == expert else None for each in range(num_experts)), weights.router
        )

    def pair(self, expert: int) -> Pair:
        """The weights of the expert at this position and of the router."""
        return Pair(self.experts[expert], self.router, self.run.url)

    def __iter__(self) -> Iterator[Weights]:
        return (weights for weights in (self.router, *self.experts) if weights is not None)

    def steps(self) -> dict[str, dict[str, Any] | None]:
        """Steps of the weights of each network, by its name, and whether its training has ended."""
        numbers = self.clusters or range(len(self.experts))
        named = {expert_name(number): weights for number, weights in zip(numbers, self.experts, strict=True)}
        named |= {str(ROUTER): self.router}
        if own := [weights for weights in self if weights.artifact.kind in EXTRAS]:
            named = {own[0].artifact.kind: own[0]}
        return {
            name: None if weights is None else {"step": weights.step, "final": weights.final}
            for name, weights in named.items()
        }


Load = Callable[[Version, Weights], Awaitable[bool]]
"""Loads weights of a version, router first, in the processes that need them; False if no process does now."""


class Versions:
    """Looks for the weights to serve: the newest of each network of a run, or those that a file pins.

    If the file names another run, they are that run's. What was loaded of one is known by the weights, of any run.
    """

    def __init__(self, run: Run, pin_file: str | None = None, dense: str | None = None):
        """`pin_file`: see `read_pins`. `dense`: one of EXTRAS, as a mixture of one, in place of the experts.

        It is always this run's own.
        """
        self._own, self._pin_file, self._dense = _Jobs(run, dense), pin_file, dense
        self._now = self._own
        self._refused, self._known = set[Weights](), set[Weights]()

    @property
    def settled(self) -> bool:
        """True if the newest version is final: every job has ended, and no file can pin others."""
        return self._pin_file is None and self._own.complete

    def newest(self) -> Version:
        """The version to serve now. Raises ServeError if no expert has weights, ConfigError for a pin that can't be
        met or a run that can't be served, DriftError or CorruptArtifact for jobs with results that don't fit the run.
        """
        pins = Pins() if self._pin_file is None else read_pins(self._pin_file)
        self._now = jobs = self._jobs_of(pins)
        names = [network_name(job) for job in trained_of(jobs.run.config)]
        if unknown := set() if self._dense and pins.run else pins.steps.keys() - set(names):
            raise ConfigError(f"pin_file {self._pin_file}: {min(unknown)[:60]!r} isn't one of {', '.join(names)}")
        jobs.look(self._refused)
        chosen = {job: self._chosen(jobs, job, pins.steps.get(network_name(job))) for job in jobs.all}
        experts = tuple(chosen[expert] for expert in jobs.experts)
        if not any(experts):
            first, run = jobs.experts[0], jobs.run
            if run.by_hand(first):
                raise ServeError(f"no {first.kind} of {run.url} is accepted yet", Accept(run.url, first))
            raise ServeError(
                f"no {first.kind} of {run.url} has published weights yet", run.make(first, with_others=True)
            )
        clusters = tuple(each.cluster for each in jobs.experts if each.cluster is not None)
        return Version(jobs.run, experts, chosen.get(ROUTER), clusters)

    def _jobs_of(self, pins: Pins) -> "_Jobs":
        """The jobs of the run that pins name. Raises ConfigError for a run that can't be served."""
        if pins.run is None or self._dense:
            return self._own
        if pins.run.rstrip("/") == self._now.run.url:
            return self._now
        try:
            run = Run.open(pins.run)
            if run.url == self._own.run.url:
                return self._own
            require_fits(self._own.run, run)
        except (RunError, MissingArtifact, ConfigError) as error:
            raise ConfigError(f"pin_file {self._pin_file}: run: {error}") from None
        return _Jobs(run)

    async def loadable(self, load: "Load", strict: bool = False) -> Version:
        """The newest version that `load` can load completely: in place of damaged weights it has older ones.

        Raises as `newest`; if `strict`, also CorruptArtifact or DriftError for damaged weights of a finished job.
        """
        while True:
            version = await asyncio.to_thread(self.newest)
            damaged = False
            for weights in version:
                if weights in self._known:
                    continue
                try:
                    if await load(version, weights):
                        self._known.add(weights)
                except (CorruptArtifact, DriftError) as error:
                    if weights.final and strict:
                        raise
                    LOG.warning("%s of step %d isn't served: %s", weights.artifact, weights.step, error)
                    self._refused.add(weights)
                    damaged = True
            if not damaged:
                return version

    def _chosen(self, jobs: "_Jobs", job: Artifact, step: int | None) -> Weights | None:
        allowed = [weights for weights in jobs.published[job] if weights not in self._refused]
        if step is None:
            return next(iter(allowed), None)
        for weights in allowed:
            if weights.step == step:
                return weights
        steps = ", ".join(str(weights.step) for weights in reversed(allowed[:20])) or "none"
        raise ConfigError(f"pin_file {self._pin_file}: {job} has no published weights of step {step}; it has {steps}")


class _Jobs:
    """The jobs of a run that are served: its experts and its router, or a network in place of the experts.

    `published`: the weights of each job at the last look.
    """

    def __init__(self, run: Run, dense: str | None = None):
        self.run, self.published = run, dict[Artifact, list[Weights]]()
        self.experts = run.experts if dense is None else (Artifact(dense),)
        self.all = [*self.experts, *({ROUTER} & set(trained_of(run.config)) if not dense else ())]

    @property
    def complete(self) -> bool:
        """True if every job has ended."""
        return all(weights and weights[0].final for weights in map(self.published.get, self.all))

    def look(self, refused: Collection[Weights]) -> None:
        """List the weights of jobs that may have newer ones. Raises DriftError and CorruptArtifact."""
        if not self.complete:
            self.published |= published(self.run, [job for job in self.all if self._may_change(job, refused)])

    def _may_change(self, job: Artifact, refused: Collection[Weights]) -> bool:
        """False for a job that has ended with sound weights: of hundreds of them no look reads a manifest again."""
        weights = self.published.get(job)
        sound = weights and weights[0].final and weights[0] not in refused
        return not sound or self.run.by_hand(job)  # another manifest may be accepted in place of one


def network_name(job: Artifact) -> str:
    """The name of the network that a job trains, as users see it: expert-003, router."""
    return str(job) if job.cluster is None else expert_name(job.cluster)


def expert_name(cluster: int) -> str:
    """The name of a cluster's expert, and of its deployment: expert-003."""
    return f"expert-{cluster:03d}"
