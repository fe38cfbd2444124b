"""Speeds of islands, in FLOP/s of all their workers together: as measured by trainings, or by peak and MFU."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from statistics import median

from ddm_ray.errors import CorruptArtifact
from ddm_ray.islands.presence import workers
from ddm_ray.placement import Island
from ddm_ray.storage.attempts import Attempt
from ddm_ray.storage.graph import Artifact
from ddm_ray.storage.job_files import list_jobs
from ddm_ray.storage.run import Run
from ddm_ray.train.hardware import SHORT_NAMES, named_peak, torch_name

MFU = (0.3, 0.5)
"""Shares of the peak that trainings of large models reach on GPUs."""
_REQUESTS = 8


@dataclass(frozen=True)
class IslandSpeed:
    """FLOP/s at which an island trains models of some kinds, at least and at most, and where that is known from.

    `by_kind` is keyed by "expert", "router" and "monolith"; for other kinds it is as for the first.
    """

    by_kind: Mapping[str, tuple[float, float]]
    source: str

    def of(self, kind: str) -> tuple[float, float]:
        """The slowest and the fastest for a kind."""
        return self.by_kind.get(kind) or next(iter(self.by_kind.values()))


def by_peak(island: Island, precision: str, flops: float | None = None, mfu: tuple[float, float] = MFU) -> IslandSpeed:
    """The speed by the peak of one of its devices, `flops` if given. Raises LookupError, in words, if none is known."""
    peak, name, device = flops, island.gpu, None
    if peak is None and isinstance(name, float):
        peak = name
    if peak is None and name is None:
        raise LookupError("no training has left its speed, and it has no gpu in the file")
    if peak is None and (device := torch_name(str(name))) is None:
        known = f"known are torch's names, numbers of FLOP/s, and {', '.join(SHORT_NAMES)}"
        raise LookupError(f"its gpu {name!r:.60} isn't known ({known})")
    if peak is None and (peak := named_peak(str(device), precision)) is None:
        raise LookupError(f"its gpu {name!r:.60} has no peak in {precision}")
    workers = island.train.workers.max
    slow, fast = (peak * workers * share for share in mfu)
    which = f" ({device})" if device not in (None, name) else ""
    source = f"{workers} x {peak / 1e12:.4g} TFLOP/s{which} at {100 * mfu[0]:.0f} to {100 * mfu[1]:.0f} % MFU"
    return IslandSpeed({"expert": (slow, fast)}, source)


def left_by_trainings(run: Run, artifacts: Sequence[Artifact]) -> dict[str, IslandSpeed]:
    """Speeds that heartbeats of trainings so far have told, by island and kind; else those of presences, which are
    rough. Unnamed islands are under "".
    """
    jobs = list_jobs(run.store, artifacts)
    attempts = [Attempt(run.store, artifact, files.attempts[-1]) for artifact, files in jobs.items() if files.attempts]
    with ThreadPoolExecutor(_REQUESTS) as pool:
        facts = list(pool.map(_claimed_speed, attempts))
    known: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for attempt, fact in zip(attempts, facts, strict=True):
        if fact:
            known[fact[0]][Artifact(attempt.job).kind].append(fact[1])
    speeds = {
        island: IslandSpeed({kind: (median(values),) * 2 for kind, values in kinds.items()}, "as trained so far")
        for island, kinds in known.items()
    }
    for presence in workers(run.store):
        if presence.speed and presence.island not in speeds:
            speeds[presence.island] = IslandSpeed({"expert": (presence.speed,) * 2}, "as its worker says")
    return speeds


def _claimed_speed(attempt: Attempt) -> tuple[str, float] | None:
    """The island of an attempt and the FLOP/s that it told last; None if it told none."""
    with suppress(CorruptArtifact):
        speed = attempt.last_beat().get("flops_per_second")
        if isinstance(speed, int | float) and math.isfinite(speed) and speed > 0:
            return str(attempt.claim().get("island") or ""), float(speed)
    return None
