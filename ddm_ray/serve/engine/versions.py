"""Versions: the published weights of a run that are served, the newest or those that a file pins. No Ray.

Shapes: K experts.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import PositiveInt, TypeAdapter, ValidationError

from ddm_ray.config import read_yaml
from ddm_ray.errors import ConfigError, CorruptArtifact, DriftError, ServeError
from ddm_ray.jobs.published import Weights, published
from ddm_ray.remedies import Accept
from ddm_ray.run.graph import EXTRAS, ROUTER, Artifact, trained_of
from ddm_ray.run.run import Run
from ddm_ray.spelling import one_line
from ddm_ray.store.store import Store

LOG = logging.getLogger("ray.serve")
PIN_BYTES = 2**16
_PINS = TypeAdapter(dict[str, PositiveInt])


Pair = tuple[Weights | None, Weights | None]
"""Weights of one expert and of the router, which a replica of the expert needs."""


@dataclass(frozen=True)
class Version:
    """The weights that a request is sampled with, of each expert and of the router; None: none are published yet.

    `clusters`: the experts' numbers; none: 0 to K - 1.
    """

    experts: tuple[Weights | None, ...]
    router: Weights | None
    clusters: tuple[int, ...] = ()

    @classmethod
    def of_pair(cls, expert: int, num_experts: int, weights: Pair) -> "Version":
        """A version with only the expert at this position."""
        own, router = weights
        return cls(tuple(own if each == expert else None for each in range(num_experts)), router)

    def pair(self, expert: int) -> Pair:
        """The weights of the expert at this position and of the router."""
        return self.experts[expert], self.router

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
    """Looks at a run for the weights to serve: the newest of each network, or those that a file pins."""

    def __init__(self, run: Run, pin_file: str | None = None, dense: str | None = None):
        """`pin_file`: see `read_pins`. `dense`: one of EXTRAS, as a mixture of one, in place of the experts."""
        self._run, self._pin_file = run, pin_file
        self.experts = run.experts if dense is None else (Artifact(dense),)
        self._jobs = [*self.experts, *({ROUTER} & set(trained_of(run.config)) if not dense else ())]
        self._published: dict[Artifact, list[Weights]] = {}
        self._refused, self._known = set[Weights](), set[Weights]()

    @property
    def settled(self) -> bool:
        """True if the newest version is final: every job has ended, and no file can pin others."""
        return self._pin_file is None and self._complete

    @property
    def _complete(self) -> bool:
        return all(weights and weights[0].final for weights in map(self._published.get, self._jobs))

    def _may_change(self, job: Artifact) -> bool:
        """False for a job that has ended with sound weights: of hundreds of them no look reads a manifest again."""
        weights = self._published.get(job)
        sound = weights and weights[0].final and weights[0] not in self._refused
        return not sound or self._run.by_hand(job)  # another manifest may be accepted in place of one

    def newest(self) -> Version:
        """The version to serve now. Raises ServeError if no expert has weights, ConfigError for a pin that can't be
        met, DriftError or CorruptArtifact for jobs with results that don't fit the run.
        """
        pins = {} if self._pin_file is None else read_pins(self._pin_file)
        names = [network_name(job) for job in trained_of(self._run.config)]
        if unknown := pins.keys() - set(names):
            raise ConfigError(f"pin_file {self._pin_file}: {min(unknown)[:60]!r} isn't one of {', '.join(names)}")
        if not self._complete:
            self._published |= published(self._run, filter(self._may_change, self._jobs))
        chosen = {job: self._chosen(job, pins.get(network_name(job))) for job in self._jobs}
        experts = tuple(chosen[expert] for expert in self.experts)
        if not any(experts):
            first, run = self.experts[0], self._run
            if run.by_hand(first):
                raise ServeError(f"no {first.kind} of {run.url} is accepted yet", Accept(run.url, first))
            raise ServeError(
                f"no {first.kind} of {run.url} has published weights yet", run.make(first, with_others=True)
            )
        clusters = tuple(each.cluster for each in self.experts if each.cluster is not None)
        return Version(experts, chosen.get(ROUTER), clusters)

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

    def _chosen(self, job: Artifact, step: int | None) -> Weights | None:
        allowed = [weights for weights in self._published[job] if weights not in self._refused]
        if step is None:
            return next(iter(allowed), None)
        for weights in allowed:
            if weights.step == step:
                return weights
        steps = ", ".join(str(weights.step) for weights in reversed(allowed[:20])) or "none"
        raise ConfigError(f"pin_file {self._pin_file}: {job} has no published weights of step {step}; it has {steps}")


def network_name(job: Artifact) -> str:
    """The name of the network that a job trains, as users see it: expert-003, router."""
    return str(job) if job.cluster is None else expert_name(job.cluster)


def expert_name(cluster: int) -> str:
    """The name of a cluster's expert, and of its deployment: expert-003."""
    return f"expert-{cluster:03d}"


def read_pins(url: str) -> dict[str, int]:
    """Steps by network (expert-002: 400) of a YAML file at a path or URI; empty if there is no file.

    Raises ConfigError for any other content.
    """
    folder, slash, name = url.rpartition("/")
    try:
        text = Store(folder or slash or ".").read(name, PIN_BYTES + 1)
    except FileNotFoundError:
        return {}
    if len(text) > PIN_BYTES:
        raise ConfigError(f"pin_file {url}: has more than {PIN_BYTES} bytes")
    try:
        return _PINS.validate_python(read_yaml(text, f"pin_file {url}", dict[str, int]) or {})
    except (ConfigError, ValueError) as error:
        what = error.errors()[0]["msg"] if isinstance(error, ValidationError) else one_line(error, 100)
        raise ConfigError(f"pin_file {url}: write lines such as `expert-002: 400`, a step each: {what}") from None
