"""Counters of a server in Prometheus' format."""

from collections.abc import Callable, Iterator
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from ddm_ray.serve.engine.engine_thread import EngineThread
from ddm_ray.serve.engine.multiplexer import Multiplexer
from ddm_ray.serve.engine.versions import Version, expert_name

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
DENSE = "dense"
"""Label of a network without experts, in place of a strategy or an expert."""
VELOCITIES = (1, 5, 10, 25, 50, 100, 250, 1000)


class Meters:
    """Counters of one ingress, in a registry of their own, and gauges of its engine."""

    def __init__(self, engine: Callable[[], EngineThread]):
        self._all = CollectorRegistry()
        counter, gauge = partial(Counter, registry=self._all), partial(Gauge, registry=self._all)
        histogram = partial(Histogram, registry=self._all)
        self.answers = counter(
            "ddm_answers",
            "Answers by route and status; as all here, those of the one replica of api that answers",
            ["route", "status"],
        )
        self.images = counter("ddm_images", "Images made, by strategy; dense: without experts", ["strategy"])
        self.degraded = counter("ddm_degraded", "Requests that an expert was left out of", ["expert"])
        self.seconds = histogram(
            "ddm_request_seconds", "Time from a request to its images", ["strategy"], buckets=SECONDS
        )
        self.first_step = histogram("ddm_first_step_seconds", "Time that images waited for a batch", buckets=SECONDS)
        self.steps = counter("ddm_steps", "Steps of images, by the expert that weighed most", ["expert"])
        self.segments = counter(
            "ddm_segments", "Calls of engines, by their expert; all: one that has or asks every expert", ["expert"]
        )
        self.switches = counter("ddm_switches", "Images that left an expert for another", ["expert"])
        self.velocities = histogram(
            "ddm_segment_velocities", "Velocities that a segment lasted", ["expert"], buckets=VELOCITIES
        )
        self.calls = counter(
            "ddm_calls",
            "Velocities that experts of other processes were asked for, by their way: link, serve",
            ["way"],
        )
        self.weights = gauge("ddm_weights_step", "Step of the weights that are served; -1: none yet", ["network"])
        gauge("ddm_batch_rows", "Images in the batch").set_function(lambda: engine().batch_rows)
        gauge("ddm_waiting_rows", "Images that wait for a place in it").set_function(lambda: engine().waiting_rows)
        gauge("ddm_velocities", "Velocities that batches have had").set_function(lambda: engine().num_velocities)

        self._all.register(_Swaps(engine))

    def asked(self, over_links: int, through_serve: int) -> None:
        """Count velocities that experts of other processes have computed."""
        self.calls.labels("link").inc(over_links)
        self.calls.labels("serve").inc(through_serve)

    def segment(
        self, expert: int, velocities: int, switched: int, waited_s: float | None, label: str | None = None
    ) -> None:
        """Count a segment, its images that switched experts, and the seconds before it if it began a request.

        `expert`: its number, -1 for an engine of all. `label`: of a network that isn't an expert.
        """
        name = label or ("all" if expert < 0 else expert_name(expert))
        if waited_s is not None:
            self.first_step.observe(waited_s)
        self.segments.labels(name).inc()
        self.velocities.labels(name).observe(velocities)
        if switched:
            self.switches.labels(name).inc(switched)

    def serves(self, version: Version, before: Version | None = None) -> None:
        """Note the steps of the weights that are served, by network; those that only the version `before` had go."""
        for name in before.steps().keys() - version.steps().keys() if before else ():
            self.weights.remove(name)
        for name, weights in version.steps().items():
            self.weights.labels(name).set(-1 if weights is None else weights["step"])

    def page(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self._all)


class _Swaps(Collector):
    """Counts that a multiplexer keeps itself; none for another engine."""

    def __init__(self, engine: Callable[[], EngineThread]):
        self._engine = engine

    def describe(self) -> Iterator[CounterMetricFamily]:
        return iter(())  # else the registry collects at once, before there is an engine

    def collect(self) -> Iterator[CounterMetricFamily]:
        engines = self._engine()
        if not isinstance(engines, Multiplexer):
            return
        for name, text, counts_K in (
            ("ddm_swaps", "Weights brought to the device, by expert", engines.swaps_K),
            ("ddm_swap_wait_seconds", "Time for which computing waited for weights", engines.waited_K),
        ):
            family = CounterMetricFamily(name, text, labels=["expert"])
            for cluster, count in zip(engines.clusters, counts_K.tolist(), strict=True):
                family.add_metric([expert_name(cluster)], count)
            yield family
