"""Counters of a server, as Prometheus reads them."""

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from ddm_ray.serve.engine import BatchEngine

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
VELOCITIES = (1, 5, 10, 25, 50, 100, 250, 1000)


class Meters:
    """Counters of one ingress, in a registry of their own; `engines` by name are looked at whenever they are read."""

    def __init__(self, engines: dict[str, BatchEngine]):
        self._registry = CollectorRegistry()
        self._registry.register(_Engines(engines))
        into = self._registry
        self.answers = Counter("ddm_answers", "Answers by route and status", ["route", "status"], registry=into)
        self.images = Counter("ddm_images", "Images made, by strategy", ["strategy"], registry=into)
        self.degraded = Counter("ddm_degraded", "Requests that an expert was left out of", ["expert"], registry=into)
        self.seconds = Histogram(
            "ddm_request_seconds", "Time from a request to its images", ["strategy"], buckets=SECONDS, registry=into
        )
        self.steps = Counter("ddm_steps", "Steps of images, by the expert that weighed most", ["expert"], registry=into)
        self.segments = Counter(
            "ddm_segments",
            "Calls of engines, by their expert; all: one that has or asks every expert",
            ["expert"],
            registry=into,
        )
        self.switches = Counter("ddm_switches", "Images that left an expert for another", ["expert"], registry=into)
        self.velocities = Histogram(
            "ddm_segment_velocities", "Velocities that a segment lasted", ["expert"], buckets=VELOCITIES, registry=into
        )

    def segment(self, expert: str, velocities: int, switched: int) -> None:
        """Count a segment, and how many of its images went on elsewhere."""
        self.segments.labels(expert).inc()
        self.velocities.labels(expert).observe(velocities)
        if switched:
            self.switches.labels(expert).inc(switched)

    def page(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self._registry)


class _Engines(Collector):
    def __init__(self, engines: dict[str, BatchEngine]):
        self._engines = engines

    def collect(self) -> Iterator[GaugeMetricFamily]:
        gauges: Sequence[tuple[str, str, str]] = (
            ("ddm_batch_rows", "Images in the batch of the last velocity", "batch_rows"),
            ("ddm_waiting_rows", "Images that wait for a place in the batch", "waiting_rows"),
            ("ddm_velocities", "Velocities that batches have had", "num_velocities"),
        )
        for name, meaning, field in gauges:
            gauge = GaugeMetricFamily(name, meaning, labels=["engine"])
            for engine, its in self._engines.items():
                gauge.add_metric([engine], getattr(its, field))
            yield gauge
