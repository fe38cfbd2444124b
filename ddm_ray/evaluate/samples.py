"""Many samples of one model, in batches side by side with one CPU thread each: the fastest way for small models."""

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ddm_ray.sampling.batches import batches, joined
from ddm_ray.sampling.request import SampleRequest, SampleResult
from ddm_ray.sampling.run_models import Models

BATCH = 256


@dataclass(frozen=True)
class Samples:
    """Sampled images, and seconds per image: of one CPU core, or elapsed on an accelerator."""

    sampled: SampleResult
    seconds_per_image: float


@contextmanager
def one_thread() -> Iterator[None]:
    """Give each operation of torch one thread inside, and as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def sample(models: Models, request: SampleRequest, on_progress: Callable[[float], None] | None = None) -> Samples:
    """Sample the request's images in batches of BATCH; `on_progress` is called with the share done, 0 to 1."""
    requests = batches(request, BATCH)
    pool = ThreadPoolExecutor(_num_workers(models.device))
    try:
        futures = [pool.submit(_timed, models, batch) for batch in requests]
        for number, future in enumerate(as_completed(futures), start=1):
            future.result()
            if on_progress:
                on_progress(number / len(futures))
    finally:
        # After an error or Ctrl-C the batches that haven't begun are not worth waiting for.
        pool.shutdown(cancel_futures=True)
    parts = [future.result() for future in futures]
    return Samples(joined([sampled for sampled, _ in parts]), sum(seconds for _, seconds in parts) / len(request.seeds))


def _num_workers(device: str) -> int:
    return min(os.cpu_count() or 1, 8) if torch.device(device).type == "cpu" else 1


def _timed(models: Models, request: SampleRequest) -> tuple[SampleResult, float]:
    # A thread's own CPU time doesn't count what the other batches, or other programs, take from its core.
    clock = time.thread_time if torch.device(models.device).type == "cpu" else time.perf_counter
    start = clock()
    sampled = models.sample(request)
    return sampled, clock() - start
