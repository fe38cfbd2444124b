"""A run as Prometheus gauges. Their values come from the last survey."""

import time
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from ddm_ray.errors import ConfigError
from ddm_ray.jobs.status import Status
from ddm_ray.remedies import Give
from ddm_ray.run.info import TrainedInfo

LABELS = ("run", "artifact")
GAUGES = {
    "ddm_finished": "1 once the artifact is committed",
    "ddm_failed": "1 while the newest attempt has failed and none has begun since",
    "ddm_step": "Steps done",
    "ddm_steps": "Steps wanted",
    "ddm_saved_step": "Steps done in the state from which the next attempt continues; 0: none",
    "ddm_attempt": "Number of the attempt that trains, mostly the newest",
    "ddm_silent_seconds": "Seconds since this watcher last saw a sign of life of the attempt",
    "ddm_loss": "Training loss, mean over recent steps",
    "ddm_heldout_loss": "Loss of the EMA weights on held-out rows, when it was last measured",
    "ddm_grad_norm": "Norm of the gradient before clipping",
    "ddm_learning_rate": "Learning rate of the last step",
    "ddm_samples_per_second": "Rows trained on, over all workers",
    "ddm_mfu": "Model FLOPs utilisation, 0 to 1",
    "ddm_world_size": "Workers of the attempt",
}
RATES = ("loss", "heldout_loss", "grad_norm", "learning_rate", "samples_per_second", "mfu", "world_size")


class Gauges(Collector):
    """The gauges of one run. Unknown and outdated values are left out: a stopped job has no speed."""

    def __init__(self, run: str):
        self.run = run
        self._statuses: list[Status] = []
        self._at = time.monotonic()

    def update(self, statuses: Iterable[Status]) -> None:
        """Use this survey from now on."""
        self._statuses, self._at = list(statuses), time.monotonic()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The known values of all artifacts."""
        # The age of the survey adds to silence, so that a storage outage doesn't make a dead job look alive.
        age = time.monotonic() - self._at
        values = {status.artifact: gauge_values(status, age) for status in self._statuses}
        for name, meaning in GAUGES.items():
            gauge = GaugeMetricFamily(name, meaning, labels=LABELS)
            for artifact, known in values.items():
                if name in known:
                    gauge.add_metric((self.run, artifact), known[name])
            yield gauge


def gauge_values(status: Status, age: float = 0.0) -> dict[str, float]:
    """The gauges of one artifact by a status that is `age` seconds old."""
    values = {"ddm_finished": float(status.state == "finished")}
    job, info = status.job, status.info
    if isinstance(info, TrainedInfo):
        values |= {"ddm_step": info.step, "ddm_steps": info.step, "ddm_loss": info.loss, "ddm_attempt": info.attempts}
        if info.heldout is not None:
            values["ddm_heldout_loss"] = info.heldout.loss
    if job is None:
        return values
    values |= {"ddm_failed": float(status.state == "failed"), "ddm_step": job.step, "ddm_attempt": job.attempt}
    values["ddm_saved_step"] = job.saved
    if job.steps is not None:
        values["ddm_steps"] = job.steps
    if status.state == "begun":
        if status.silent_seconds is not None:
            values["ddm_silent_seconds"] = status.silent_seconds + age
        rates = {f"ddm_{name}": job.value(name) for name in RATES}
        values |= {name: value for name, value in rates.items() if value is not None}
    return values


def serve_gauges(gauges: Gauges, host: str, port: int) -> None:
    """Serve Prometheus at http://host:port/metrics from a thread, until the process ends. Raises ConfigError."""
    collectors = CollectorRegistry()
    collectors.register(gauges)
    try:
        start_http_server(port, host, collectors)
    except OSError as error:
        fix = Give("prometheus", "choose another port")
        raise ConfigError(f"gauges can't be served at {host}:{port}: {error.strerror}", fix) from None
