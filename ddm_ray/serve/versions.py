"""Versions: which published weights of a run are served, and a sampler whose weights change while it samples. No Ray.

Shapes: K experts.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import PositiveInt, TypeAdapter, ValidationError

from ddm_ray.errors import ConfigError, CorruptArtifact, DriftError, ServeError
from ddm_ray.jobs.published import Weights, published
from ddm_ray.remedies import Accept
from ddm_ray.run.graph import EXTRAS, ROUTER, Artifact, trained_of
from ddm_ray.run.run import Run
from ddm_ray.sampling.request import MixtureInfo, SampleRequest
from ddm_ray.serve.answers import expert_name
from ddm_ray.serve.engine import BatchEngine
from ddm_ray.serve.multiplexed import Multiplexer
from ddm_ray.serve.segments import OnStop, Sampled, SegmentSampler
from ddm_ray.spelling import one_line
from ddm_ray.store.store import Store

LOG = logging.getLogger("ray.serve")
PIN_BYTES = 2**16
_PINS = TypeAdapter(dict[str, PositiveInt])


Pair = tuple[Weights | None, Weights | None]
"""Weights of one expert and of the router: what its replica has to have."""


@dataclass(frozen=True)
class Version:
    """The weights that a request is sampled with: of each expert and of the router, None where there are none yet."""

    experts: tuple[Weights | None, ...]
    router: Weights | None

    @classmethod
    def of_pair(cls, cluster: int, num_experts: int, weights: Pair) -> "Version":
        """The version that has one expert alone."""
        own, router = weights
        return cls(tuple(own if number == cluster else None for number in range(num_experts)), router)

    def pair(self, cluster: int) -> Pair:
        """The weights of one expert and of the router."""
        return self.experts[cluster], self.router

    def __iter__(self) -> Iterator[Weights]:
        return (weights for weights in (self.router, *self.experts) if weights is not None)

    def steps(self) -> dict[str, dict[str, Any] | None]:
        """Steps of the weights of each network, by its name, and whether its training has ended."""
        named = {expert_name(number): weights for number, weights in enumerate(self.experts)}
        named |= {str(ROUTER): self.router}
        if own := [weights for weights in self if weights.artifact.kind in EXTRAS]:
            named = {own[0].artifact.kind: own[0]}
        return {
            name: None if weights is None else {"step": weights.step, "final": weights.final}
            for name, weights in named.items()
        }


Load = Callable[[Version, Weights], Awaitable[bool]]
"""Loads weights of a version, router first, wherever they are needed; False where nobody needs them now."""


class Versions:
    """Looks at a run for the weights to be served: the newest of each network, or those that a file pins."""

    def __init__(self, run: Run, pin_file: str | None = None, dense: str | None = None):
        """`pin_file`: see `read_pins`. `dense`: one of EXTRAS, as a mixture of one, in place of the experts."""
        self._run, self._pin_file = run, pin_file
        self.experts = run.experts if dense is None else (Artifact(dense),)
        self._jobs = [*self.experts, *({ROUTER} & set(trained_of(run.config)) if not dense else ())]
        self._published: dict[Artifact, list[Weights]] = {}
        self._refused, self._known = set[Weights](), set[Weights]()

    @property
    def settled(self) -> bool:
        """True if the newest version will stay so: every job has ended, and no file can pin others."""
        return self._pin_file is None and self._complete

    @property
    def _complete(self) -> bool:
        return all(weights and weights[0].final for weights in map(self._published.get, self._jobs))

    def newest(self) -> Version:
        """The version that is to be served now. Raises ServeError if no expert has weights, ConfigError for a pin
        that can't be met, DriftError, CorruptArtifact for jobs that finished otherwise than the run wants it.
        """
        pins = {} if self._pin_file is None else read_pins(self._pin_file)
        names = [network_name(job) for job in trained_of(self._run.config)]
        if unknown := pins.keys() - set(names):
            raise ConfigError(f"pin_file {self._pin_file}: {min(unknown)[:60]!r} isn't one of {', '.join(names)}")
        if not self._complete:
            self._published = published(self._run, self._jobs)
        chosen = {job: self._chosen(job, pins.get(network_name(job))) for job in self._jobs}
        experts = tuple(chosen[expert] for expert in self.experts)
        if not any(experts):
            first, run = self.experts[0], self._run
            if run.by_hand(first):
                raise ServeError(f"nobody has accepted any {first.kind} of {run.url} yet", Accept(run.url, first))
            raise ServeError(f"no {first.kind} of {run.url} has published weights yet", run.make(first))
        return Version(experts, chosen.get(ROUTER))

    async def loadable(self, load: "Load", strict: bool = False) -> Version:
        """The newest version of which `load` can load everything: where weights are damaged it has older ones.

        Raises as `newest`; if `strict`, also CorruptArtifact or DriftError for damaged ones of a job's end.
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
    """The name of what a job trains, as users see it: expert-003, router."""
    return str(job) if job.cluster is None else expert_name(job.cluster)


def read_pins(url: str) -> dict[str, int]:
    """Steps by network (expert-002: 400) of a YAML file at a path or URI; none where there is no file.

    ConfigError for another content.
    """
    folder, slash, name = url.rpartition("/")
    try:
        text = Store(folder or slash or ".").read(name, PIN_BYTES + 1)
    except FileNotFoundError:
        return {}
    if len(text) > PIN_BYTES:
        raise ConfigError(f"pin_file {url}: has more than {PIN_BYTES} bytes")
    try:
        return _PINS.validate_python(yaml.safe_load(text) or {})
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        what = error.errors()[0]["msg"] if isinstance(error, ValidationError) else one_line(error, 100)
        raise ConfigError(f"pin_file {url}: write lines such as `expert-002: 400`, a step each: {what}") from None


@dataclass(eq=False)
class _Live:
    version: Version
    sampler: SegmentSampler
    engine: BatchEngine | Multiplexer
    requests: int = 0


class LiveSampler:
    """A sampler whose weights change while it samples: a request keeps those that it began with."""

    def __init__(self, version: Version, sampler: SegmentSampler, engine: BatchEngine | Multiplexer):
        """`engine`: the one of this process that the sampler needs, closed after its last request once replaced."""
        self._now = _Live(version, sampler, engine)

    @property
    def info(self) -> MixtureInfo:
        """The mixture, which is the same in all versions."""
        return self._now.sampler.info

    @property
    def version(self) -> Version:
        """Weights of requests that come now; set to an equal one, whose jobs have ended meanwhile."""
        return self._now.version

    @version.setter
    def version(self, version: Version) -> None:
        assert version == self._now.version
        self._now.version = version

    @property
    def engine(self) -> BatchEngine | Multiplexer:
        """The engine of requests that come now."""
        return self._now.engine

    def replace(self, version: Version, sampler: SegmentSampler, engine: BatchEngine | Multiplexer) -> None:
        """Sample what comes from now on by these."""
        before, self._now = self._now, _Live(version, sampler, engine)
        self._close_if_left(before)

    async def sample(
        self,
        request: SampleRequest,
        seconds: float | None = None,
        stops: Sequence[int] = (),
        on_stop: OnStop | None = None,
    ) -> Sampled:
        """Sample as `SegmentSampler.sample` does, from end to end by the version that is served now."""
        live = self._now
        live.requests += 1
        try:
            return await live.sampler.sample(request, seconds, stops, on_stop)
        finally:
            live.requests -= 1
            self._close_if_left(live)

    def _close_if_left(self, live: _Live) -> None:
        if live is not self._now and not live.requests:
            live.engine.close(0)


async def follow(
    versions: Versions,
    live: LiveSampler,
    load: Load,
    put: Callable[[Version], Awaitable[None]],
    every_s: float,
    forget: Callable[[], None] = lambda: None,
) -> None:
    """Have newer weights served as they are published, until there will be none.

    What can't be served is logged, `forget` gives back what was loaded of it, and the next look may find better.
    """
    failed = False
    while failed or not versions.settled:
        await asyncio.sleep(every_s)
        try:
            version = await versions.loadable(load)
            if version != live.version:
                await put(version)
            live.version, failed = version, False
        # Of storage, of Ray, of too little memory: none touches what is served.
        except Exception as error:
            LOG.warning("the weights that are served stay as they are: %s", one_line(error, 500))
            forget()
            failed = True
