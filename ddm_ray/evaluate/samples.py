"""Many samples of one model: batches side by side, one CPU thread each, which small models like best."""

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ddm_ray.sampling.checkpoint import Models, batches, joined
from ddm_ray.sampling.request import Sampled, SampleRequest

BATCH = 256


@dataclass(frozen=True)
class Samples:
    """What was sampled, and seconds per image: of one CPU core, or elapsed on an accelerator."""

    sampled: Sampled
    seconds_per_image: float


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread for each operation of torch inside, as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def sample(models: Models, request: SampleRequest, done: Callable[[float], None] | None = None) -> Samples:
    """The request's images in batches of BATCH; `done` is called with the share that is done."""
    requests = batches(request, BATCH)
    pool = ThreadPoolExecutor(_num_workers(models.device))
    try:
        futures = [pool.submit(_timed, models, batch) for batch in requests]
        for number, future in enumerate(as_completed(futures), start=1):
            future.result()
            if done:
                done(number / len(futures))
    finally:
        # After an error or Ctrl-C the batches that haven't begun are not worth waiting for.
        pool.shutdown(cancel_futures=True)
    parts = [future.result() for future in futures]
    return Samples(joined([sampled for sampled, _ in parts]), sum(seconds for _, seconds in parts) / len(request.seeds))


def _num_workers(device: str) -> int:
    return min(os.cpu_count() or 1, 8) if torch.device(device).type == "cpu" else 1


def _timed(models: Models, request: SampleRequest) -> tuple[Sampled, float]:
    # A thread's own CPU time doesn't count what the other batches, or other programs, take from its core.
    clock = time.thread_time if torch.device(models.device).type == "cpu" else time.perf_counter
    start = clock()
    sampled = models.sample(request)
    return sampled, clock() - start
