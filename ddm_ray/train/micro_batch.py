"""The largest micro-batch that fits: found by trial steps on an engine that is thrown away before training begins."""

import gc
import math
import os
import resource
from collections.abc import Callable

import torch
import torch.distributed as dist

from ddm_ray.errors import ConfigError
from ddm_ray.memory import free_bytes, reset_peak, taken_bytes
from ddm_ray.placement import TrainPlacement
from ddm_ray.train.attempt import TrainAttempt
from ddm_ray.train.batches import RankBatches
from ddm_ray.train.engine import Engine
from ddm_ray.train.hardware import ranks_here
from ddm_ray.train.job import TrainJob
from ddm_ray.train.snapshot import Snapshot
from ddm_ray.train.watchdog import Watchdog

# What of its memory a worker may take: allocators waste some, not all steps are alike, and others need some too. On a
# CPU one and the same step was seen to take a sixth more or less from one time to the next.
FULL_CPU, FULL_GPU = 0.7, 0.85


def find_micro_batch(
    job: TrainJob,
    batches_of: Callable[[int], RankBatches],
    make: Callable[[], Engine],
    attempt: TrainAttempt,
    placement: TrainPlacement,
    watchdog: Watchdog,
) -> None:
    """Set the attempt's micro-batch to the most rows that every rank of this world can take at once, in equal parts.

    All ranks must ask. `batches_of` are those of a micro-batch; `make` makes the engine for the trials. Raises
    OutOfMemory if more were tried than fit, and ConfigError where memory can't be measured.
    """
    attempt.phase("fitting")
    engine = make()
    memory = Memory(engine.device, placement)
    snapshot = Snapshot(engine.shards.owned())  # a state takes memory too
    snapshot.take()
    snapshot.copy()
    share = math.ceil(job.batch / dist.get_world_size())
    rows = largest(_trial(job, batches_of, engine, attempt, memory, watchdog), share)
    engine.close()
    del engine, snapshot
    gc.collect()
    memory.begin()
    attempt.searches, attempt.micro_batch = False, math.ceil(share / math.ceil(share / rows))
    attempt.phase("starting")


def _trial(
    job: TrainJob,
    batches_of: Callable[[int], RankBatches],
    engine: Engine,
    attempt: TrainAttempt,
    memory: "Memory",
    watchdog: Watchdog,
) -> Callable[[int], float]:
    """Takes a step with so many rows at once; the share of what a rank may take that it took, on the fullest one."""
    world = dist.get_world_size()

    def trial(rows: int) -> float:
        attempt.micro_batch = rows
        memory.begin()
        # The last step is one of those with the most tokens; the second micro-batch finds the first one's gradients.
        batches = batches_of(rows).at(job.train.steps - 1, engine.device, most=2)
        with attempt.catch_oom(), watchdog.step():
            engine.accumulate(job.objective, batches)
            engine.step(0.0)
        watchdog.forget()  # more rows take longer
        used: list[float] = [0.0] * world
        dist.all_gather_object(used, memory.used())
        return max(used)

    return trial


def largest(trial: Callable[[int], float], share: int) -> int:
    """The most rows up to `share` of which `trial` says that a step takes no more than 1, all it may; one at least.

    What it says is taken to rise by as much with each row: but for two, no more are tried than seem to fit. That may
    be more than do where memory taken before hides the first rows' part; then the next attempt takes half as many.
    """
    rows, used, each = 1, trial(1), 0.0
    more = 2 if share > 1 and used <= 1 else 1
    while more > rows:
        now, doubled, each_before = trial(more), more == 2 * rows, each
        each = (now - used) / (more - rows)
        rows, used = more, now
        # Rows that find room between what is held already seem to take less than the next ones will.
        steepest = max(each, each_before)
        fit = share if steepest <= 0 else max(1, rows + math.floor((1 - used) / steepest))
        if fit < 2 * rows and (fit < rows or not doubled):
            return min(rows, fit)
        more = min(2 * rows, fit, share)
    return rows


class Memory:
    """Memory of its device that a worker may take, and the share of that which it took at the most.

    ConfigError for a CPU where that can't be measured.
    """

    def __init__(self, device: torch.device, placement: TrainPlacement):
        self._device, self._compiles = device, placement.compile
        asked = placement.resources_per_worker
        if device.type == "cuda":
            self._part = FULL_GPU * min(1.0, asked.get("GPU", 1.0))
            return
        reset_peak()
        try:
            self._held = taken_bytes("VmRSS")
        except OSError:
            raise ConfigError("micro_batch: largest needs a GPU, or Linux; give a number") from None
        # Other ranks, and other jobs on the other CPUs, begin at the same time.
        free = free_bytes() * min(1.0 / ranks_here(), asked.get("CPU", 1.0) / (os.cpu_count() or 1))
        limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
        if limit != resource.RLIM_INFINITY:
            free = min(free, limit - taken_bytes("VmData"))
        self._free = FULL_CPU * free

    def begin(self) -> None:
        """Give back what is cached, and look at what is taken from here on."""
        if self._compiles:
            torch.compiler.reset()  # else it compiles for so many shapes, and for no more
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)

    def used(self) -> float:
        """The share that it took at the most. A CPU's process keeps what it had, so that its trials are to grow."""
        if self._device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self._device)
            taken = torch.cuda.max_memory_reserved(self._device)
            return taken / (self._part * (free + torch.cuda.memory_reserved(self._device)))
        return (taken_bytes("VmHWM") - self._held) / max(self._free, 1)
