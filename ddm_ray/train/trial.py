"""Trial steps of a job on this machine, on rows of random numbers: the time and the memory of a step."""

import math
import time
from statistics import median

import torch
from torch import Tensor

from ddm_ray.config import DataConfig
from ddm_ray.core.augmentation import Views
from ddm_ray.core.condition import Condition, Text, TextIds
from ddm_ray.core.transfer import frozen_dtype
from ddm_ray.data.loading.loader import LoadedBatch
from ddm_ray.data.text_encoding import StoredTexts
from ddm_ray.memory import reset_peak, taken_bytes
from ddm_ray.models.text import TextEncoder
from ddm_ray.placement import TrainPlacement
from ddm_ray.train.batches import RankBatches
from ddm_ray.train.claiming import default_threads
from ddm_ray.train.compiling import keep_code, try_code
from ddm_ray.train.engine import Engine, own_device
from ddm_ray.train.job import TrainJob

MIN_STEPS, SECONDS, ROWS = 2, 5.0, 256


class RandomRows:
    """Random numbers in place of a loader's rows, and random ids for the text encoder in place of texts."""

    def __init__(self, data: DataConfig, num_clusters: int, encoder: TextEncoder | None):
        random = torch.Generator().manual_seed(0)
        self._data_NCHW = torch.randn(ROWS, *data.shape, generator=random)
        self._cluster_N = torch.randint(num_clusters, (ROWS,), generator=random)
        self._condition: Condition | TextIds = torch.randint(max(1, len(data.class_names)), (ROWS,), generator=random)
        self.null_text: Text | None = None
        if data.text is not None:
            pooled = None if data.text.pooled_dim is None else torch.zeros(ROWS, data.text.pooled_dim)
            mask_NL = torch.ones(ROWS, data.text.tokens, dtype=torch.bool)
            text = Text(torch.randn(*mask_NL.shape, data.text.dim, generator=random), mask_NL, pooled)
            self.null_text = text[:1]
            self._condition = text if encoder is None else _random_ids(encoder, random)

    def batch(self, step: int, place_B: Tensor, views: Views | None = None) -> LoadedBatch:
        """Rows for these places of a batch, as `Loader.batch`."""
        row_B = (place_B + step) % ROWS
        return LoadedBatch(self._data_NCHW[row_B], self._condition[row_B], self._cluster_N[row_B])

    def cluster_B(self, step: int, place_B: Tensor) -> Tensor:
        """The clusters of these rows, as `Loader.cluster_B`."""
        return self._cluster_N[(place_B + step) % ROWS]


def _random_ids(encoder: TextEncoder, random: torch.Generator) -> TextIds:
    known = encoder.model.get_input_embeddings().num_embeddings
    ids_NL = torch.randint(known, (ROWS, encoder.tokens), generator=random)
    pooled = None if encoder.pooled is None else _random_ids(encoder.pooled, random)
    return TextIds(ids_NL, torch.ones_like(ids_NL, dtype=torch.bool), pooled)


def trial(job: TrainJob, data: DataConfig, num_clusters: int, placement: TrainPlacement) -> tuple[float, float]:
    """Seconds of a job's step on one of the placement's workers, and the most bytes of memory that it takes.

    The job uses no teachers. Memory is the GPU's if the worker has one, otherwise this process's. It runs in a
    torch.distributed world of one. Rows that keep ids of texts need the run's text encoder on this machine. Raises as
    `TextEncoder.from_config` and `try_code` do.
    """
    workers, device = placement.workers.max, own_device()
    torch.set_num_threads(placement.threads or default_threads(placement, job))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    keep_code(placement.cache)
    reset_peak()
    encoder = TextEncoder.from_config(data.text) if data.text is not None and data.text.stored == "ids" else None
    rows, texts = RandomRows(data, num_clusters, encoder), None
    if encoder is not None and rows.null_text is not None:
        texts = StoredTexts(encoder.to(device, frozen_dtype(device)), rows.null_text.to(device))
    share = math.ceil(job.batch / workers)
    at_once = min(share, placement.micro_batch or share)
    batches = RankBatches(job, rows, 0, workers, at_once, texts=texts)
    engine = Engine(job.build(), job.train, placement)
    if engine.compiled_unasked:
        try_code(engine, job, batches, 0)
    similar_steps = job.train.steps - job.train.unmasked_steps  # with as many tokens each
    times: list[float] = []
    while len(times) < MIN_STEPS or sum(times) < SECONDS:
        began, step = time.monotonic(), len(times) % similar_steps
        loss = engine.accumulate(job.objective, batches.at(step, device))
        engine.step(job.learning_rate(step))
        float(loss)  # this waits for the GPU
        times.append(time.monotonic() - began)
    batches.close()
    engine.close()
    memory = torch.cuda.max_memory_reserved() if device.type == "cuda" else taken_bytes("VmHWM")
    return median(times[1:]), memory  # the first step compiles
