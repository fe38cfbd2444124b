"""A short calibration: real steps of a run's jobs on this machine, on made-up rows. Nothing of the run is touched."""

import math
import time
from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from ddm_ray.config import DataConfig
from ddm_ray.core.augmentation import Views
from ddm_ray.core.condition import Condition, Text, TextIds
from ddm_ray.core.transfer import frozen_dtype
from ddm_ray.data.loading.loader import LoadedBatch
from ddm_ray.data.text_encoding import StoredTexts
from ddm_ray.models import weights
from ddm_ray.models.text import TextEncoder
from ddm_ray.placement import TrainPlacement
from ddm_ray.train.batches import RankBatches
from ddm_ray.train.claiming import own_threads
from ddm_ray.train.compiling import keep_code, try_code
from ddm_ray.train.consensus import Flags, StepResults
from ddm_ray.train.engine import Engine
from ddm_ray.train.job import TrainJob
from ddm_ray.train.objectives import Batch

WARM_STEPS, LEAST_STEPS, SECONDS = 5, 10, 5.0
_ROWS = 256


class MadeUpRows:
    """Rows of random numbers in place of a loader's: as many as a batch asks for, of the right shapes.

    `encoder`: whose ids their texts are, which are encoded beside training; none: they have features.
    """

    def __init__(self, data: DataConfig, num_clusters: int, encoder: TextEncoder | None = None):
        random = torch.Generator().manual_seed(0)
        self._data_NCHW = torch.randn(_ROWS, *data.shape, generator=random)
        self._label_N = torch.randint(max(1, len(data.class_names)), (_ROWS,), generator=random)
        self._cluster_N = torch.randint(num_clusters, (_ROWS,), generator=random)
        self._text = None if data.text is None else _texts(data, random)
        self._ids = None if encoder is None else _ids(encoder, random)
        self.null_text = None if self._text is None else _taken(self._text, torch.zeros(1, dtype=torch.int64))

    def batch(self, step: int, place_B: Tensor, views: Views | None = None) -> LoadedBatch:
        """Rows for these places of a batch, as `Loader.batch`."""
        row_B = (place_B + step) % _ROWS
        condition: Condition | TextIds = self._label_N[row_B]
        if self._ids is not None:
            condition = self._ids[row_B]
        elif self._text is not None:
            condition = _taken(self._text, row_B)
        return LoadedBatch(self._data_NCHW[row_B], condition, self._cluster_N[row_B])

    def cluster_B(self, step: int, place_B: Tensor) -> Tensor:
        """The clusters of these rows, as `Loader.cluster_B`."""
        return self._cluster_N[(place_B + step) % _ROWS]


class MadeUpTeacher:
    """Networks of random weights, each asked about every row, as often as a student's job says; it may have none."""

    by_cluster = False

    def __init__(self, job: TrainJob, device: torch.device):
        precision = frozen_dtype(device)
        self._networks = [weights.build(spec).eval().to(device, precision) for spec in job.asked]

    def taught(self, batch: Batch, cluster_B: Tensor) -> Batch:
        """The batch with what its first network, an expert's like, predicts, or else any numbers."""
        with torch.no_grad():
            answers = [network(batch.data_BCHW, batch.t_B, batch.encoded) for network in self._networks]
        return replace(batch, teacher_BCHW=(answers or [batch.data_BCHW])[0].to(batch.data_BCHW))


def _texts(data: DataConfig, random: torch.Generator) -> Text:
    assert data.text is not None
    tokens_NLE = torch.randn(_ROWS, data.text.tokens, data.text.dim, generator=random)
    pooled = data.text.pooled_dim
    pooled_NP = None if pooled is None else torch.randn(_ROWS, pooled, generator=random)
    return Text(tokens_NLE, torch.ones(_ROWS, data.text.tokens, dtype=torch.bool), pooled_NP)


def _ids(encoder: TextEncoder, random: torch.Generator) -> TextIds:
    known = encoder.model.get_input_embeddings().num_embeddings
    ids_NL = torch.randint(known, (_ROWS, encoder.tokens), generator=random)
    pooled = None if encoder.pooled is None else _ids(encoder.pooled, random)
    return TextIds(ids_NL, torch.ones_like(ids_NL, dtype=torch.bool), pooled)


def _taken(text: Text, row_B: Tensor) -> Text:
    return Text(text.tokens_BLE[row_B], text.mask_BL[row_B], None if text.pooled_BP is None else text.pooled_BP[row_B])


def calibrate(
    jobs: Mapping[str, TrainJob],
    data: DataConfig,
    num_clusters: int,
    placement: TrainPlacement,
    seconds: float = SECONDS,
) -> dict[str, float]:
    """FLOP/s of all the placement's workers together, by the jobs' names, after `seconds` of steps of each.

    Where rows keep ids of texts these are encoded, too, by the run's own encoder, which this island then needs. In a
    torch.distributed world of one. One worker's part of a batch is measured, and taken times the workers. Raises as
    `TextEncoder.from_config` and `try_code` do; to compile comes on top of the seconds.
    """
    assert dist.get_world_size() == 1
    torch.set_num_threads(placement.threads or max(own_threads(placement, job) for job in jobs.values()))
    encoder = None
    if data.text is not None and data.text.stored == "ids":
        encoder = TextEncoder.from_config(data.text)
    rows = MadeUpRows(data, num_clusters, encoder)
    return {name: _speed(job, rows, encoder, placement, seconds) for name, job in jobs.items()}


def _speed(
    job: TrainJob, rows: MadeUpRows, encoder: TextEncoder | None, placement: TrainPlacement, seconds: float
) -> float:
    workers = placement.workers.max
    share = math.ceil(job.batch / workers)
    given = placement.micro_batch
    rows_at_once = min(share, given) if isinstance(given, int) else share
    keep_code(placement.cache)
    engine = Engine(job.build(), job.train, placement)
    teacher = MadeUpTeacher(job, engine.device) if job.asked else None
    texts = None
    if encoder is not None and rows.null_text is not None:
        own = encoder.to(engine.device, frozen_dtype(engine.device))
        texts = StoredTexts(own, rows.null_text.to(engine.device))
    batches = RankBatches(job, rows, 0, workers, rows_at_once, teacher, texts)
    if engine.compiled_unasked:
        try_code(engine, job, batches, 0)

    # Steps of which all see as many tokens.
    alike = job.train.steps - job.train.unmasked_steps

    results = StepResults()

    def take(step: int) -> None:
        loss = engine.accumulate(job.objective, batches.at(step % alike, engine.device))
        norm = engine.step(job.learning_rate(step % alike))
        results.exchange(step, loss, norm, Flags())

    for step in range(WARM_STEPS):
        take(step)
    began, steps = time.monotonic(), 0
    while steps < LEAST_STEPS or time.monotonic() - began < seconds:
        take(WARM_STEPS + steps)
        steps += 1
    results.rest()
    took = time.monotonic() - began
    engine.close()
    return job.training_flops(1) * steps / took
