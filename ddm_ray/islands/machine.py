"""The plan of a run on this machine alone: rows a cluster, memory, disk and time, and what the machine won't hold."""

import math
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from ddm_ray.config import RunConfig
from ddm_ray.cores import usable_cores
from ddm_ray.data.schema import EMBEDDING, data_dtype
from ddm_ray.data.sources.look import count_rows
from ddm_ray.errors import DDMError
from ddm_ray.islands.needs import LIBRARIES_BYTES, ModelNeeds, needs_of
from ddm_ray.islands.speeds import left_by_trainings
from ddm_ray.memory import free_bytes, reset_peak, taken_bytes, total_bytes
from ddm_ray.placement import TrainPlacement
from ddm_ray.storage.graph import PARTITION, ROWS, Artifact, inputs
from ddm_ray.storage.info import PartitionInfo, RowsInfo
from ddm_ray.storage.manifest import Manifest
from ddm_ray.storage.run import Run
from ddm_ray.train.hardware import peak_flops

Measure = Literal["never", "if quick", "always"]
"""Rule for trial steps that have room: taken never, where they take at most TRIAL_SECONDS, or always."""
TRIAL_SECONDS = 60.0
_LEAST_MFU = 0.1
# Of an embedding whose network isn't loaded, and of the thumbnail beside latents.
_EMBEDDING_DIM, _THUMBNAIL_BYTES = 768, 3000


@dataclass(frozen=True)
class KindPlan:
    """Trainings of one kind: their number, how many are `left` (parts count), and what one of them takes.

    `memory` in bytes, as trial steps had it, or (not `memory_measured`) without activations. `seconds` of a training
    from its first step to its last, None if they aren't known, as `source` says.
    """

    kind: str
    number: int
    left: float
    parameters: int
    steps: int
    memory: float
    memory_measured: bool
    state_bytes: int
    weights_bytes: int
    seconds: float | None
    source: str


@dataclass(frozen=True)
class MachinePlan:
    """Needs of a run on this machine. Sizes in bytes.

    `rows` of the source, None if only reading tells; `rows_K` are the training rows by cluster, once it is partitioned.
    `memory_free` and `memory_total` are a GPU's with `use_gpu`. `disk` is what is still to be written at most,
    `disk_free` None where the run isn't on a disk of this machine. `at_once`: trainings side by side. `seconds` until
    all is trained, None if that isn't known.
    """

    clusters: int
    rows: int | None
    rows_K: tuple[int, ...] | None
    rows_bytes: int | None
    kinds: tuple[KindPlan, ...]
    use_gpu: bool
    cores: int
    gpus: int
    memory_free: float
    memory_total: float
    disk: float
    disk_free: int | None
    at_once: int
    seconds: float | None

    @property
    def warnings(self) -> list[str]:
        """A line for each thing that this machine won't hold."""
        lines = []
        for each in self.kinds:
            who = "the GPU" if self.use_gpu else "this machine"
            for name, size in (("has", self.memory_total), ("has free now", self.memory_free)):
                if each.left and each.memory > size:
                    needs = f"{each.kind}: training takes {each.memory / 1e9:,.3g} GB of memory"
                    lines.append(f"{needs}, and {who} {name} {size / 1e9:,.3g} GB: it won't fit")
                    break
        if self.disk_free is not None and self.disk > self.disk_free:
            lines.append(
                f"rows, states and weights take up to {self.disk / 1e9:,.3g} GB more, and the disk has"
                f" {self.disk_free / 1e9:,.3g} GB free: it won't hold them"
            )
        return lines


def plan_machine(run: Run, trained: Sequence[Artifact], placement: TrainPlacement, measure: Measure) -> MachinePlan:
    """The plan of training these artifacts on this machine by workers placed so. Writes nothing.

    Times are those that trainings left in the run; else those of trial steps, if they are to be measured. Once a
    process with trial steps.
    """
    config = run.config
    needs = needs_of(run, trained)
    kinds = [_estimated(need, placement) for need in needs]
    left = left_by_trainings(run, trained).get("") if measure != "never" else None
    if left is not None:
        known = {kind: speed for kind, (speed, _) in left.by_kind.items()}
        kinds = [
            _timed(each, need, known, "as trained so far", placement) for each, need in zip(kinds, needs, strict=True)
        ]
    kinds = _measured(kinds, needs, placement, measure)
    free, total = _memory(placement)
    rows, rows_K, rows_bytes, rows_left = _rows(run)
    cores, gpus = usable_cores(), torch.cuda.device_count()
    at_once = _at_once(kinds, placement, cores, gpus)
    seconds = {
        artifact: share * each.seconds
        for each, need in zip(kinds, needs, strict=True)
        for artifact, share in need.left.items()
        if each.seconds is not None
    }
    states = [each.state_bytes + each.weights_bytes for each in kinds for _ in range(math.ceil(each.left))]
    newest = max((each.state_bytes for each in kinds if each.left), default=0)
    return MachinePlan(
        config.partition.num_clusters,
        rows,
        rows_K,
        rows_bytes,
        tuple(kinds),
        placement.use_gpu,
        cores,
        gpus,
        free,
        total,
        rows_left + sum(states) + min(at_once, len(states)) * placement.keep_states * newest,
        _disk_free(run.url) if run.store.local else None,
        at_once,
        makespan(config, seconds, at_once) if len(seconds) == len(trained) else None,
    )


def makespan(config: RunConfig, seconds: Mapping[Artifact, float], slots: int) -> float:
    """Seconds until all is trained, in `slots` trainings at a time, each once what it is made from is."""
    free, ends = [0.0] * slots, dict[Artifact, float]()
    # In the order in which they are queued where all are trained by one command.
    for artifact in sorted(seconds, key=lambda each: (each.kind == "student", each.kind != "monolith")):
        ready = max((ends.get(each, 0.0) for each in inputs(config, artifact)), default=0.0)
        begins = max(min(free), ready)
        ends[artifact] = free[free.index(min(free))] = begins + seconds[artifact]
    return max(ends.values(), default=0.0)


def _estimated(need: ModelNeeds, placement: TrainPlacement) -> KindPlan:
    sizes = need.memory(placement.workers.max, True, placement.teachers)
    on_gpu = sizes[placement.zero_stage] or max(size for size in sizes if size)
    return KindPlan(
        need.kind,
        len(need.left),
        sum(need.left.values()),
        need.parameters,
        need.job.train.steps,
        on_gpu if placement.use_gpu else need.memory_on_cpu(placement) * placement.workers.max,
        False,
        need.state_bytes,
        need.weights_bytes,
        None,
        "not measured",
    )


def _timed(
    plan: KindPlan, need: ModelNeeds, speeds: Mapping[str, float], source: str, placement: TrainPlacement
) -> KindPlan:
    if need.kind not in speeds:
        return plan
    return replace(plan, seconds=need.flops / speeds[need.kind], source=source)


def _measured(
    kinds: list[KindPlan], needs: Sequence[ModelNeeds], placement: TrainPlacement, measure: Measure
) -> list[KindPlan]:
    """The plans with times and memory of trial steps, of those that are left and whose time isn't known."""
    if measure == "never" or all(each.seconds is not None for each in kinds):
        return kinds
    if not placement.use_gpu:
        os.environ["DS_ACCELERATOR"] = "cpu"  # before DeepSpeed is loaded: it would take any GPU that it sees
    from ddm_ray.islands.calibration import LEAST_STEPS, SECONDS, WARM_STEPS, calibrate
    from ddm_ray.train import local

    measured = []
    with local.world():
        for plan, need in zip(kinds, needs, strict=True):
            why_not = _too_much(plan, need, placement, WARM_STEPS + LEAST_STEPS, patient=measure == "always")
            if plan.seconds is not None or not plan.left or why_not:
                known = plan.seconds is not None or not plan.left
                measured.append(plan if known else replace(plan, source=f"not measured: {why_not}"))
                continue
            reset_peak()
            config, job = need.config, {need.kind: need.job}
            speeds = calibrate(job, config.data, config.partition.num_clusters, placement, SECONDS)
            timed = _timed(plan, need, speeds, "by trial steps", placement)
            if not placement.use_gpu:
                # The process that tends a training comes on top, as libraries' part of it do.
                memory = max(plan.memory, taken_bytes("VmHWM") + LIBRARIES_BYTES / 2)
                timed = replace(timed, memory=memory, memory_measured=True)
            measured.append(timed)
    return measured


def _too_much(plan: KindPlan, need: ModelNeeds, placement: TrainPlacement, steps: int, patient: bool) -> str | None:
    """Why trial steps of a kind aren't taken, or not by who isn't `patient`; None: they are."""
    if plan.memory > _memory(placement)[0]:
        return f"trial steps need {plan.memory / 1e9:,.3g} GB of memory"
    if placement.use_gpu or patient:
        return None
    peak = peak_flops(torch.device("cpu"), need.job.train.precision)
    flops = need.job.training_flops(steps)
    if peak and (seconds := flops / (_LEAST_MFU * peak)) > TRIAL_SECONDS:
        return f"trial steps may take {seconds / 60:,.0f} minutes, if they are asked for"
    return None


def _memory(placement: TrainPlacement) -> tuple[float, float]:
    """Bytes of memory that are free, and all: of this machine, or of its first GPU where trainings use one each."""
    return torch.cuda.mem_get_info() if placement.use_gpu else (free_bytes(), total_bytes())


def _at_once(kinds: Sequence[KindPlan], placement: TrainPlacement, cores: int, gpus: int) -> int:
    if placement.use_gpu:
        return max(1, gpus // placement.workers.max)
    room = cores / (placement.workers.max * placement.asked.get("CPU", 1.0))
    if most := max((each.memory for each in kinds if each.left), default=0.0):
        room = min(room, free_bytes() / most)
    return max(1, int(room))


def _rows(run: Run) -> tuple[int | None, tuple[int, ...] | None, int | None, int]:
    """Rows, those by cluster, and bytes of them: as prepared rows and shards together, and what is to be written."""
    rows, partition, config = _info(run, ROWS), _info(run, PARTITION), run.config
    in_source = None if rows or config.partition.given else count_rows(config.data)  # owners name their own
    count = RowsInfo.of(rows).rows if rows else in_source
    rows_K = tuple(PartitionInfo.of(partition).rows_K) if partition else None
    if partition:
        sizes = [*run.store.sizes(ROWS).values(), *run.store.sizes(PARTITION).values()]
        return count, rows_K, sum(sizes), 0
    if count is None:
        return None, None, None, 0
    shard, row = _row_bytes(config)
    prepared = sum(run.store.sizes(ROWS).values()) if rows else count * row
    return count, None, prepared + count * shard, (0 if rows else prepared) + count * shard


def _info(run: Run, artifact: Artifact) -> Manifest | None:
    with suppress(DDMError):  # its own stage says so
        return run.finished(artifact)
    return None


def _row_bytes(config: RunConfig) -> tuple[int, int]:
    """Bytes of a row in its shard, and among the prepared rows, before they are compressed."""
    data, embedder = config.data, config.embedder
    size = (math.prod(data.stored_shape) + data.stores_mirrored * math.prod(data.shape)) * data_dtype(data).itemsize
    if data.text is not None:
        size += data.text.token_bytes + data.text.pooled_bytes
    embedding = embedder.dim if embedder.kind == "pixels" else _EMBEDDING_DIM
    return size, size + embedding * EMBEDDING.itemsize + (_THUMBNAIL_BYTES if data.latents else 0)


def _disk_free(folder: str) -> int:
    path = Path(folder)
    existing = next(each for each in (path, *path.parents) if each.exists())
    return shutil.disk_usage(existing).free
