"""The plan of a run: rows, memory, disk and time of its training jobs in a given placement. It writes nothing."""

import math
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ddm_ray.config import DataConfig
from ddm_ray.config.networks import SIZES
from ddm_ray.cores import usable_cores
from ddm_ray.data import OnProgress, no_progress
from ddm_ray.data.schema import EMBEDDING, data_dtype
from ddm_ray.data.sources.look import count_source_rows
from ddm_ray.errors import DDMError
from ddm_ray.islands.needs import LIBRARIES_BYTES, ModelNeeds, needs_of
from ddm_ray.memory import free_bytes
from ddm_ray.placement import Island, TrainPlacement
from ddm_ray.run.graph import PARTITION, ROWS, Artifact, wanted_of
from ddm_ray.run.info import PartitionInfo, RowsInfo
from ddm_ray.run.manifest import Manifest
from ddm_ray.run.run import Run
from ddm_ray.spelling import one_line

# Assumed dimension of an embedding, as its network isn't loaded, and assumed size of the thumbnail beside latents.
_EMBEDDING_DIM, _THUMBNAIL_BYTES = 768, 3000


NOT_MEASURED = "not measured"
"""Reason why a time is unknown: there were no trial steps."""


@dataclass(frozen=True)
class KindPlan:
    """Training jobs that are alike: their number, how many are `left` (parts count), and what each takes, in bytes.

    `kind`: the name of `ModelNeeds`.
    `rows`, `rows_bytes`: smallest and largest number of a job's rows, and their bytes; None if only reading the source
    tells. `memory`: that of a worker, without activations unless `measured`. `disk`: its last state and weights.
    `seconds`: time from the first step to the last; None if that isn't known, and `unknown` says why.
    """

    kind: str
    number: int
    left: float
    parameters: int
    rows: tuple[int, ...] | None
    rows_bytes: tuple[int, ...] | None
    memory: float
    disk: int
    measured: bool = False
    seconds: float | None = None
    unknown: str = NOT_MEASURED


@dataclass(frozen=True)
class RunPlan:
    """All training jobs of a run, `at_once` of them in parallel. Sizes are in bytes.

    `rows_bytes`: those of the prepared rows and the shards. `disk`: the most that is still to be written. `disk_free`:
    None if the run isn't on a disk of this machine. `memory_free`: that of a GPU, if jobs use GPUs. `seconds`: time
    until all is trained, None if unknown. `price_per_hour`: that of the island, if it names one.
    """

    trainings: tuple[KindPlan, ...]
    rows: int | None
    rows_bytes: int | None
    at_once: int
    memory_free: float
    disk: int
    disk_free: int | None
    seconds: float | None
    price_per_hour: float | None


def plan(
    run: Run, trained: Sequence[Artifact], site: Island, measures: bool, on_progress: OnProgress = no_progress
) -> RunPlan:
    """The plan to train these artifacts on the island `site`, which has machines like this one; unnamed: this machine.

    `measures`: measure times by trial steps, which a process can do only once.
    """
    placement, needs = site.train, needs_of(run, trained)
    (rows, rows_bytes, to_write), folder = _rows(run), Path(run.url)
    kinds = [_estimated(need, run, rows, placement) for need in needs]
    if measures and any(each.left for each in kinds):
        kinds = list(_measured(kinds, needs, placement, on_progress))
    left = [(each, share) for each, need in zip(kinds, needs, strict=True) for share in need.left.values() if share]
    at_once = max(1, min(len(left), 1 if site.name else _at_once(kinds, placement)))
    times = [share * each.seconds for each, share in left if each.seconds is not None]
    # Older states are deleted once a job is finished.
    passing = at_once * placement.keep_states * max((need.state_bytes for need in needs), default=0)
    return RunPlan(
        tuple(kinds),
        rows,
        rows_bytes,
        at_once,
        _memory_free(placement),
        to_write + sum(each.disk for each, _ in left) + passing * bool(left),
        shutil.disk_usage(next(filter(Path.exists, [folder, *folder.parents]))).free if run.store.local else None,
        None if len(times) < len(left) else max(sum(times) / at_once, max(times, default=0.0)),
        site.price_per_hour,
    )


@dataclass(frozen=True)
class SizePlan:
    """The largest named size that an expert on an island may have: its parameters and memory; None: not even Ti.

    `free`: bytes of memory that a worker of the island has; None if the island's file doesn't say.
    """

    island: str
    free: float | None
    size: str | None = None
    parameters: int = 0
    memory: float = 0.0


def largest_sizes(run: Run, sites: Sequence[Island]) -> list[SizePlan]:
    """For each island the largest DiT that trains in the memory of one of its workers, activations apart.

    Empty if the run's experts are no DiTs, or if a training has begun: a run's networks never change. A single island
    is this machine, if its file doesn't say its memory.
    """
    needs = needs_of(run, wanted_of(run.config))
    if any(share < 1 for need in needs for share in need.left.values()):
        return []
    sized = {size: each for size in reversed(SIZES) if (each := needs[0].sized(size)) is not None}
    plans = []
    for site in sites if sized else ():
        free = _memory_free(site.train) if site.memory is None and len(sites) == 1 else site.memory
        taken = {size: need.memory_in(site.train) for size, need in sized.items()}
        size = next((size for size, memory in taken.items() if free is not None and memory <= free), None)
        parts = (size, sized[size].parameters, taken[size]) if size else ()
        plans.append(SizePlan(site.name, free, *parts))
    return plans


def _estimated(need: ModelNeeds, run: Run, count: int | None, placement: TrainPlacement) -> KindPlan:
    partition, clusters = _info(run, PARTITION), need.config.partition.num_clusters
    rows = rows_bytes = None
    if partition and need.rows:
        rows_of = dict(zip(need.config.partition.clusters, PartitionInfo.of(partition).rows_K, strict=True))
        own = [sum(rows_of.values()) if each.cluster is None else rows_of[each.cluster] for each in need.left]
        rows = min(own), max(own)
        rows_bytes = min(need.rows.values()), max(need.rows.values())
    elif count is not None:
        of_one = count // clusters if need.kind == "expert" else count
        rows, rows_bytes = (of_one,) * 2, (of_one * _row_bytes(need.config.data),) * 2
    return KindPlan(
        need.name,
        len(need.left),
        sum(need.left.values()),
        need.parameters,
        rows,
        rows_bytes,
        need.memory_in(placement),
        need.state_bytes + need.weights_bytes,
    )


def _measured(
    kinds: Sequence[KindPlan], needs: Sequence[ModelNeeds], placement: TrainPlacement, on_progress: OnProgress
) -> Iterator[KindPlan]:
    """The plans with times and memory of trial steps. A student's time follows from the experts' speed."""
    if not placement.use_gpu:
        os.environ["DS_ACCELERATOR"] = "cpu"  # before DeepSpeed is imported, which would use any GPU that it sees
    from ddm_ray.train import local
    from ddm_ray.train.trial import trial

    speed = 0.0  # FLOP/s
    with local.world():
        for number, (each, need) in enumerate(zip(kinds, needs, strict=True)):
            job, config = need.job, need.config
            on_progress(number / len(kinds), f"trial steps: {each.kind}")
            flops, of_step = job.training_flops(job.train.steps), job.training_flops(1)
            if job.asked:
                yield replace(each, seconds=flops / speed if speed else None, unknown="no expert's time is known")
                continue
            if each.memory > _memory_free(placement):
                yield replace(each, unknown="too little memory for trial steps")
                continue
            try:
                step_seconds, memory = trial(job, config.data, config.partition.num_clusters, placement)
            except Exception as error:  # compilers and a lack of memory raise errors of any kind
                yield replace(each, unknown=one_line(error, 200))
                continue
            speed = speed or of_step / step_seconds
            # The job's controller comes on top, with its share of the libraries.
            memory += 0 if placement.use_gpu else LIBRARIES_BYTES / 2
            yield replace(each, measured=True, memory=memory, seconds=step_seconds * flops / of_step)


def _memory_free(placement: TrainPlacement) -> float:
    """Bytes of free memory on this machine, or on its first GPU if jobs use GPUs."""
    return torch.cuda.mem_get_info()[0] if placement.use_gpu else free_bytes()


def _at_once(kinds: Sequence[KindPlan], placement: TrainPlacement) -> int:
    """Number of training jobs for which this machine has room at the same time."""
    if placement.use_gpu:
        return torch.cuda.device_count() // placement.workers.max
    room = usable_cores() / placement.asked.get("CPU", 1.0), free_bytes() / max(each.memory for each in kinds)
    return int(min(room) / placement.workers.max)


def _rows(run: Run) -> tuple[int | None, int | None, int]:
    """Number of rows, bytes of prepared rows and shards together, and how many of these bytes are still to be written.

    The first two are None if only reading the source tells.
    """
    rows, config = _info(run, ROWS), run.config
    written = [sum(run.store.sizes(each).values()) if _info(run, each) else 0 for each in (ROWS, PARTITION)]
    in_source = None if rows or config.partition.given else count_source_rows(config.data)  # each owner has a source
    count = RowsInfo.of(rows).rows if rows else in_source
    if count is None:
        return None, None, 0
    embedding = config.embedder.dim if config.embedder.kind == "pixels" else _EMBEDDING_DIM
    row = _row_bytes(config.data) + embedding * EMBEDDING.itemsize + _THUMBNAIL_BYTES * bool(config.data.latents)
    sizes = [size or count * each for size, each in zip(written, (row, _row_bytes(config.data)), strict=True)]
    return count, sum(sizes), sum(sizes) - sum(written)


def _info(run: Run, artifact: Artifact) -> Manifest | None:
    with suppress(DDMError):  # the artifact's stage reports it
        return run.finished(artifact)
    return None


def _row_bytes(data: DataConfig) -> int:
    """Bytes of a row in its shard, uncompressed."""
    size = (math.prod(data.stored_shape) + data.stores_mirrored * math.prod(data.shape)) * data_dtype(data).itemsize
    return size + (data.text.token_bytes + data.text.pooled_bytes if data.text else 0)
