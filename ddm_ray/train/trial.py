"""Trial steps of a job on this machine, on rows of random numbers: how long a step takes, and how much memory."""

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
from ddm_ray.train.claiming import own_threads
from ddm_ray.train.compiling import keep_code, try_code
from ddm_ray.train.engine import Engine, own_device
from ddm_ray.train.job import TrainJob

LEAST_STEPS, SECONDS, ROWS = 2, 5.0, 256


class RandomRows:
    """Random numbers in place of a loader's rows, and random ids of this text encoder's in place of texts' ids."""

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
    """Seconds of a job's step, and bytes of memory that it takes of one of the placement's workers at the most.

    The job asks no teachers; memory is a GPU's where the worker has one, else this process's.
    In a torch.distributed world of one. Rows that keep ids of texts need the run's text encoder on this machine. Raises
    as `TextEncoder.from_config` and `try_code` do.
    """
    workers, device = placement.workers.max, own_device()
    torch.set_num_threads(placement.threads or own_threads(placement, job))
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
    alike = job.train.steps - job.train.unmasked_steps  # steps that see as many tokens
    times: list[float] = []
    while len(times) < LEAST_STEPS or sum(times) < SECONDS:
        began, step = time.monotonic(), len(times) % alike
        loss = engine.accumulate(job.objective, batches.at(step, device))
        engine.step(job.learning_rate(step))
        float(loss)  # until then a GPU isn't done with it
        times.append(time.monotonic() - began)
    batches.close()
    engine.close()
    memory = torch.cuda.max_memory_reserved() if device.type == "cuda" else taken_bytes("VmHWM")
    return median(times[1:]), memory  # code is made in the first one
