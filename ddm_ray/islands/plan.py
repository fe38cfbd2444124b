"""The plan of a run: rows, memory, disk and time of its trainings where they are placed so. Writes nothing."""

import math
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ddm_ray.config import DataConfig
from ddm_ray.cores import usable_cores
from ddm_ray.data.schema import EMBEDDING, data_dtype
from ddm_ray.data.sources.look import count_source_rows
from ddm_ray.errors import DDMError
from ddm_ray.islands.needs import LIBRARIES_BYTES, ModelNeeds, needs_of
from ddm_ray.memory import free_bytes
from ddm_ray.placement import Island, TrainPlacement
from ddm_ray.run.graph import PARTITION, ROWS, Artifact
from ddm_ray.run.info import PartitionInfo, RowsInfo
from ddm_ray.run.manifest import Manifest
from ddm_ray.run.run import Run
from ddm_ray.spelling import one_line

# Of an embedding whose network isn't loaded, and of the thumbnail beside latents.
_EMBEDDING_DIM, _THUMBNAIL_BYTES = 768, 3000


@dataclass(frozen=True)
class KindPlan:
    """Trainings of one kind: their number, how many are `left` (parts count), and what one of them takes, in bytes.

    `rows` that one trains on, least and most, and their bytes: None where only reading the source tells. `memory` of a
    worker, without activations unless `measured`. `disk`: its last state and weights. `seconds` from its first step to
    its last; None if that isn't known, `unknown` says why.
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
    unknown: str = "not measured"


@dataclass(frozen=True)
class RunPlan:
    """All trainings of a run, `at_once` of them side by side. Sizes in bytes.

    `rows_bytes`: of the prepared rows and the shards. `disk` is what is still to be written at most; `disk_free` is
    None where the run isn't on a disk of this machine. `memory_free` is a GPU's, where trainings use these. `seconds`
    until all is trained, None if that isn't known. `price_per_hour` is the island's, if it has one.
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


def plan(run: Run, trained: Sequence[Artifact], site: Island, measures: bool) -> RunPlan:
    """The plan of training these artifacts as an island would that this machine is of; unnamed: on this one alone.

    `measures`: times are by trial steps, which a process takes only once.
    """
    placement, needs = site.train, needs_of(run, trained)
    (rows, rows_bytes, to_write), folder = _rows(run), Path(run.url)
    kinds = [_estimated(need, run, rows, placement) for need in needs]
    if measures and any(each.left for each in kinds):
        kinds = list(_measured(kinds, needs, placement))
    left = [(each, share) for each, need in zip(kinds, needs, strict=True) for share in need.left.values() if share]
    at_once = max(1, min(len(left), 1 if site.name else _at_once(kinds, placement)))
    times = [share * each.seconds for each, share in left if each.seconds is not None]
    # States before the last one go once a training is finished.
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


def _estimated(need: ModelNeeds, run: Run, count: int | None, placement: TrainPlacement) -> KindPlan:
    partition, clusters = _info(run, PARTITION), need.config.partition.num_clusters
    sizes = need.memory(placement.workers.max, True, placement.teachers)
    on_gpu = sizes[placement.zero_stage] or max(size for size in sizes if size)
    rows = rows_bytes = None
    if partition and need.rows:
        rows_K = PartitionInfo.of(partition).rows_K
        rows = (min(rows_K), max(rows_K)) if need.kind == "expert" else (sum(rows_K),) * 2
        rows_bytes = min(need.rows.values()), max(need.rows.values())
    elif count is not None:
        of_one = count // clusters if need.kind == "expert" else count
        rows, rows_bytes = (of_one,) * 2, (of_one * _row_bytes(need.config.data),) * 2
    return KindPlan(
        need.kind,
        len(need.left),
        sum(need.left.values()),
        need.parameters,
        rows,
        rows_bytes,
        on_gpu if placement.use_gpu else need.memory_on_cpu(placement),
        need.state_bytes + need.weights_bytes,
    )


def _measured(kinds: Sequence[KindPlan], needs: Sequence[ModelNeeds], placement: TrainPlacement) -> Iterator[KindPlan]:
    """The plans with times and memory of trial steps; a student's time is by the experts' speed."""
    if not placement.use_gpu:
        os.environ["DS_ACCELERATOR"] = "cpu"  # before DeepSpeed is loaded: it would take any GPU that it sees
    from ddm_ray.train import local
    from ddm_ray.train.trial import trial

    speed = 0.0  # FLOP/s
    with local.world():
        for each, need in zip(kinds, needs, strict=True):
            job, config = need.job, need.config
            flops, of_step = job.training_flops(job.train.steps), job.training_flops(1)
            if job.asked:
                yield replace(each, seconds=flops / speed if speed else None, unknown="no expert's time is known")
                continue
            if each.memory > _memory_free(placement):
                yield replace(each, unknown="too little memory for trial steps")
                continue
            try:
                step_seconds, memory = trial(job, config.data, config.partition.num_clusters, placement)
            except Exception as error:  # whatever a compiler, or too little memory, raises
                yield replace(each, unknown=one_line(error, 200))
                continue
            speed = speed or of_step / step_seconds
            # The process that tends a training comes on top, as its part of the libraries does.
            memory += 0 if placement.use_gpu else LIBRARIES_BYTES / 2
            yield replace(each, measured=True, memory=memory, seconds=step_seconds * flops / of_step)


def _memory_free(placement: TrainPlacement) -> float:
    """Bytes of memory that are free: of this machine, or of its first GPU where trainings use GPUs."""
    return torch.cuda.mem_get_info()[0] if placement.use_gpu else free_bytes()


def _at_once(kinds: Sequence[KindPlan], placement: TrainPlacement) -> int:
    """Number of trainings that this machine has room for side by side."""
    if placement.use_gpu:
        return torch.cuda.device_count() // placement.workers.max
    room = usable_cores() / placement.asked.get("CPU", 1.0), free_bytes() / max(each.memory for each in kinds)
    return int(min(room) / placement.workers.max)


def _rows(run: Run) -> tuple[int | None, int | None, int]:
    """Rows of the source, bytes of them as prepared rows and shards together, and how many of these are to be written.

    None where only reading the source tells.
    """
    rows, config = _info(run, ROWS), run.config
    written = [sum(run.store.sizes(each).values()) if _info(run, each) else 0 for each in (ROWS, PARTITION)]
    in_source = None if rows or config.partition.given else count_source_rows(config.data)  # owners name their own
    count = RowsInfo.of(rows).rows if rows else in_source
    if count is None:
        return None, None, 0
    embedding = config.embedder.dim if config.embedder.kind == "pixels" else _EMBEDDING_DIM
    row = _row_bytes(config.data) + embedding * EMBEDDING.itemsize + _THUMBNAIL_BYTES * bool(config.data.latents)
    sizes = [size or count * each for size, each in zip(written, (row, _row_bytes(config.data)), strict=True)]
    return count, sum(sizes), sum(sizes) - sum(written)


def _info(run: Run, artifact: Artifact) -> Manifest | None:
    with suppress(DDMError):  # its own stage says so
        return run.finished(artifact)
    return None


def _row_bytes(data: DataConfig) -> int:
    """Bytes of a row in its shard before they are compressed."""
    size = (math.prod(data.stored_shape) + data.stores_mirrored * math.prod(data.shape)) * data_dtype(data).itemsize
    return size + (data.text.token_bytes + data.text.pooled_bytes if data.text else 0)
