"""The stage `prepare`: source -> decoded chunks -> embedded parts -> the artifact of rows, by Ray Data.

A row of the pipeline is a whole chunk, and so is a block; what comes back to the driver is the name of its record.
"""

import math
import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
import ray.data
from ray.data.context import AutoscalingConfig
from ray.exceptions import RayError as RaysOwnError
from ray.exceptions import RayTaskError, UserCodeException

from ddm_ray.data import Progress
from ddm_ray.data.census import ENOUGH_SEEN, check_rejected, commit
from ddm_ray.data.chunks import FinishChunks, fit
from ddm_ray.data.decoding import as_task, raise_failed, read_units
from ddm_ray.data.parts import Parts, Plan, Record, list_source, rows_artifact, source_of
from ddm_ray.data.sources import Source, open_source
from ddm_ray.data.sources import chunk_rows as rows_per_chunk
from ddm_ray.data.sources.chunks import CHUNK_BYTES
from ddm_ray.errors import RayError
from ddm_ray.placement import KEEP_FREED_MEMORY, Placement
from ddm_ray.storage.manifest import Manifest
from ddm_ray.storage.records import Place, chunks_done
from ddm_ray.storage.run import Run

MAX_REJECTED = 0.05
TASKS_PER_CORE = 16


def prepare(
    run: Run,
    progress: Progress | None = None,
    placement: Placement | None = None,
    source: str | None = None,
    cluster: int | None = None,
    max_rejected: float = MAX_REJECTED,
    chunk_rows: int | None = None,
) -> Manifest:
    """Make the artifact `rows` of the run's source; a no-op if it is finished. Ray must be initialised.

    `source`, `cluster`: of one owner, where shards are given. `chunk_rows`: rows of a part, none: those that fill
    64 MiB. Killed at any moment, called again it goes on; others may be preparing the same rows at the same time.
    Raises DataError if no row can be used, more than the share `max_rejected` can't, an id comes twice or a network
    doesn't fit; ConfigError, DriftError, CorruptArtifact, StorageError, RayError.
    """
    artifact = rows_artifact(run, cluster)
    tell = progress or (lambda fraction, note: None)
    placement = placement or Placement()
    parts = Parts(run, artifact)
    name = source_of(parts, source, cluster)
    if finished := run.finished(artifact):
        return finished
    tell(0.0, "listing the source")
    size = chunk_rows or rows_per_chunk(run.config.data)
    listed = open_source(run.config.data, name, size)
    plan = parts.plan(partial(list_source, run.config, name, listed, size))
    opened = open_source(run.config.data, plan.source, plan.chunk_rows, plan.classes)
    places = parts.places()
    records = dict(zip(places, parts.records(places), strict=True))
    tell(0.0, "fitting the embedder")
    fit(parts, plan, opened)
    view = _View(plan, tell, list(records.values()))
    # Closed also where this raises: what of Ray Data is left when Ray is gone would start another Ray.
    with closing(_make_missing(parts, plan, opened, placement, list(records))) as made:
        for row in made:
            raise_failed(row["error"])
            place = Place.parse(row["record"])
            assert place is not None
            if place not in records:
                records[place] = parts.record(place)
            view.show(records[place], row["until"])
            if view.too_many_rejected(max_rejected):
                check_rejected(parts, plan, list(records.values()), max_rejected, view.expected)
    tell(0.99, "checking")
    # Another's, of a command that runs at the same time or was killed before its result came here.
    theirs = [place for place in parts.places() if place not in records]
    everything = [*records.values(), *parts.records(theirs)]
    check_rejected(parts, plan, everything, max_rejected)
    manifest = commit(parts, plan, everything)
    tell(1.0, f"{manifest.info['rows']} rows, {manifest.info['rejected']} rejected")
    return manifest


class _View:
    """Tells how much of the source's bytes is read, at which speed, and when it will be done."""

    def __init__(self, plan: Plan, tell: Any, records: list[Record]):
        self._bytes = [max(1, unit.bytes) for unit in plan.units]
        self._total, self._tell = sum(self._bytes), tell
        self._read: dict[int, float] = {}
        self._bytes_read = 0.0
        self._rows = sum(record.rows for record in records)
        self._rejected = sum(record.rejected for record in records)
        for unit in chunks_done(record.place for record in records)[1]:
            self._advance(unit, 1.0)
        self._began: tuple[float, float, int] | None = None
        self._tell(self._fraction, "loading networks, then decoding and embedding")

    @property
    def _fraction(self) -> float:
        return min(0.99, self._bytes_read / self._total)

    def _advance(self, unit: int, until: float) -> None:
        before = self._read.get(unit, 0.0)
        if until > before:
            self._read[unit] = until
            self._bytes_read += self._bytes[unit] * (until - before)

    @property
    def seen(self) -> int:
        """Rows that were read, usable or not."""
        return self._rows + self._rejected

    @property
    def expected(self) -> float:
        """About how many rows there will be in the end, by the bytes that are read."""
        return self.seen / self._fraction if self._fraction else math.inf

    def too_many_rejected(self, most: float) -> bool:
        """Whether more than the share `most` of all rows to come is rejected already."""
        return self.seen >= ENOUGH_SEEN and self._rejected > most * self.expected

    def show(self, record: Record, until: float) -> None:
        """One more chunk is finished, up to which the share `until` of its unit is read."""
        self._advance(record.place.unit, until)
        self._rows += record.rows
        self._rejected += record.rejected
        now, note = (time.monotonic(), self._fraction, self._rows), f"{self._rows} rows, {self._rejected} rejected"
        # Speed counts from the first chunk: before it came, processes were started and networks loaded.
        self._began = self._began or now
        took, part, rows = (here - there for here, there in zip(now, self._began, strict=True))
        if took > 0 and part > 0:
            note += f", {rows / took:.0f} rows/s, {took * (1 - self._fraction) / part:.0f} s left"
        self._tell(self._fraction, note)


def _make_missing(
    parts: Parts, plan: Plan, source: Source, placement: Placement, places: list[Place]
) -> Generator[dict[str, Any], None, None]:
    """Make all chunks that have no record; yields a row of `decoding.DONE` of each.

    Which chunks a task makes is fixed before it starts: Ray makes lost ones again by running it again.
    """
    chunks, whole = chunks_done(places)
    units = ((number, unit) for number, unit in enumerate(plan.units) if number not in whole)
    missing = [as_task(number, unit, chunks.get(number, set())) for number, unit in units]
    if not missing:
        return
    shares = _Shares.of(placement)
    num_blocks = min(len(missing), TASKS_PER_CORE * shares.tasks)
    dataset = ray.data.from_items(missing, override_num_blocks=num_blocks)
    _one_chunk_a_block(dataset.context, shares.tasks + shares.actors)
    read = partial(read_units, source=source, config=parts.run.config.data)
    finished = dataset.map_batches(
        read,
        batch_size=None,
        batch_format="pyarrow",
        num_cpus=shares.task_cpus,
        compute=ray.data.TaskPoolStrategy(min(shares.tasks, num_blocks)),
    ).map_batches(
        FinishChunks,
        fn_constructor_args=(parts.run, parts.artifact, "cuda" if placement.use_gpu else "cpu"),
        batch_size=None,
        batch_format="pyarrow",
        # A pool of fixed size can hang on an errored block (ray#62746). Two calls at once: one embeds, one writes.
        compute=ray.data.ActorPoolStrategy(
            min_size=1,
            max_size=max(2, shares.actors),
            max_tasks_in_flight_per_actor=2,
            max_concurrent_calls_per_actor=2,
            enable_true_multi_threading=True,
        ),
        num_cpus=shares.actor_cpus,
        num_gpus=shares.actor_gpus,
        runtime_env={"env_vars": KEEP_FREED_MEMORY},
    )
    try:
        yield from finished.iter_rows()
    except RaysOwnError as error:
        if (ours := _our_own(error)) is not None:
            raise RayError(
                f"{parts.url}: {ours}; this is likely a bug, which the same command would meet again: report it with"
                " the traceback in ray-data/ray-data.log among the logs of this Ray"
            ) from error
        reason = " ".join(str(error).split())
        raise RayError(f"Ray gave up on {parts.url}: ...{reason[-300:]}; the same command goes on") from error


def _our_own(error: RaysOwnError) -> str | None:
    """The line of an exception that our functions raised on a worker; None if it is Ray's or a machine's fault."""
    if not isinstance(error, RayTaskError):
        return None
    if isinstance(error.cause, UserCodeException):
        # Of what it wraps only the traceback's text comes back.
        traceback, _, _ = str(error).partition("\nThe above exception was the direct cause")
        return traceback.strip().splitlines()[-1][:300]
    if isinstance(error.cause, RaysOwnError):
        return None
    return f"{type(error.cause).__name__}: {error.cause}".splitlines()[0][:300]


@dataclass(frozen=True)
class _Shares:
    """Actors that embed and tasks that read at once, and what one of each asks of Ray."""

    actors: int
    tasks: int
    actor_cpus: float
    actor_gpus: float | None
    task_cpus: float = 0.25

    @classmethod
    def of(cls, placement: Placement) -> "_Shares":
        """Of the Ray cluster that is joined: either kind could keep every core busy, and what is in flight between
        them decides who does.
        """
        there = ray.cluster_resources()
        cores, devices = max(1, int(there.get("CPU", 1))), int(there.get("GPU", 0))
        if placement.use_gpu and not devices:
            raise RayError("the placement says use_gpu, and this Ray cluster has no GPU; choose another island")
        actors = placement.embedders or (devices if placement.use_gpu else cores)
        # Ray Data keeps a quarter of the cores for either kind, come what may: more would have to be argued for.
        actor_cpus = min(0.24, max(0.01, math.floor(24 * cores / actors) / 100))
        return cls(actors, cores, actor_cpus, 1.0 if placement.use_gpu else None)


def _one_chunk_a_block(context: ray.data.DataContext, num_processes: int) -> None:
    context.target_max_block_size = 1
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    # One more actor whenever all have what they can take; none is given up while it may be fed again.
    context.autoscaling_config = AutoscalingConfig(
        actor_pool_util_upscaling_threshold=1.0, actor_pool_util_downscaling_threshold=-1.0
    )
    # Decoded chunks in flight, however much memory Ray has: what a process makes or works on, and the next.
    context.execution_options.resource_limits = context.execution_options.resource_limits.copy(
        object_store_memory=2 * CHUNK_BYTES * num_processes
    )
