"""A rank's part of each global batch: the same rows in the same views, noise, times and so on at any world size."""

import math
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from ddm_ray.core.augmentation import Views
from ddm_ray.core.condition import Condition, Text, TextIds, with_null
from ddm_ray.data.loading.loader import LoadedBatch
from ddm_ray.data.text_encoding import StoredTexts
from ddm_ray.train.job import TrainJob
from ddm_ray.train.objectives import Batch, Draws, draw_batch
from ddm_ray.train.teachers import Teachers


class BatchRows(Protocol):
    """A loader or its substitute: rows at places of a global batch, and the null text, if there are texts."""

    @property
    def null_text(self) -> Text | None: ...

    def batch(self, step: int, place_B: Tensor, views: Views | None = None) -> LoadedBatch: ...

    def cluster_B(self, step: int, place_B: Tensor) -> Tensor: ...


_Part = tuple[Batch, Tensor]


class RankBatches:
    """Rank `rank`'s micro-batches of a job. Rows of weight 0 fill up its share, so that all ranks' are of equal size.

    For a GPU a thread makes the next step's micro-batches meanwhile, with the same numbers, in pinned memory. `close`
    ends it.
    """

    def __init__(
        self,
        job: TrainJob,
        loader: BatchRows,
        rank: int,
        world: int,
        micro_batch: int,
        teacher: Teachers | None = None,
        texts: StoredTexts | None = None,
    ):
        self._job, self._loader, self._teacher, self._texts = job, loader, teacher, texts
        share = math.ceil(job.batch / world)
        place = torch.arange(rank * share, (rank + 1) * share)
        # Gradients are averaged over ranks, so weights of world / batch give the mean over the global batch.
        self._weight_B = (place < job.batch).float() * world / job.batch
        self._place = place % job.batch
        self._micro_batch = micro_batch
        self._thread = ThreadPoolExecutor(1, "batches")
        self._ahead: dict[int, Future[deque[_Part]]] = {}

    def close(self) -> None:
        """End the thread that reads ahead, once it has finished the step that it is reading."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def at(self, step: int, device: torch.device, most: int | None = None) -> Iterator[tuple[Batch, Tensor]]:
        """The micro-batches of global step `step`, each with the weight_B that its losses are summed with.

        `most`: only the first so many, and the thread makes nothing ahead.
        """
        ahead = device.type != "cpu" and most is None
        for batch, weight_B in self._made_ahead(step) if ahead else islice(self._parts(step), most):
            moved = on_device(batch, device, self._texts)
            if self._teacher is not None:
                moved = self._teacher.taught(moved, batch.cluster_B)
            yield moved, weight_B.to(device, non_blocking=True)

    def _parts(self, step: int) -> Iterator[_Part]:
        """Micro-batches with their weights, in the host's memory."""
        draws = draws_of(self._job, step)
        for part in self._order(step).split(self._micro_batch):
            yield batch_of(self._job, self._loader, step, self._place[part], draws), self._weight_B[part]

    def _made_ahead(self, step: int) -> Iterator[_Part]:
        """Micro-batches of a step; the thread starts with those of the next step."""

        def make(of: int) -> Future[deque[_Part]]:
            return self._thread.submit(
                lambda: deque((batch.pin_memory(), weight_B.pin_memory()) for batch, weight_B in self._parts(of))
            )

        made = (self._ahead.pop(step, None) or make(step)).result()
        self._ahead = {step + 1: make(step + 1)} if step + 1 < self._job.train.steps else {}
        while made:  # a used micro-batch is let go of at once, which frees its pinned memory
            yield made.popleft()

    def _order(self, step: int) -> Tensor:
        """The order in which this rank takes its share's rows."""
        if self._teacher is None or not self._teacher.by_cluster:
            return torch.arange(len(self._place))
        # Back and forth: the experts that a step ends with are in memory when the next step starts.
        return self._loader.cluster_B(step, self._place).argsort(stable=True, descending=bool(step % 2))


def on_device(batch: Batch, device: torch.device, texts: StoredTexts | None) -> Batch:
    """The batch on this device; texts of which rows keep the ids are encoded there."""
    if isinstance(batch.condition, TextIds):
        assert texts is not None
        batch = replace(batch, condition=texts(batch.condition))
    return batch.to(device)


def draws_of(job: TrainJob, step: int) -> Draws:
    """All random numbers of global step `step` of a job."""
    train = job.train
    fields = (job.batch, job.image_shape, train.condition_dropout, job.times, job.flow.path, job.masking(step))
    views = job.augmentation.draw(train.seed, job.key, step, job.batch)
    return replace(draw_batch(train.seed, job.key, step, *fields), views=views)


def batch_of(job: TrainJob, loader: BatchRows, step: int, place_B: Tensor, draws: Draws) -> Batch:
    """The rows at these places (int64) of global batch `step`."""
    views = None if draws.views is None else draws.views[place_B]
    data_BCHW, condition, cluster_B = loader.batch(step, place_B, views)
    return Batch(
        data_BCHW=data_BCHW,
        noise_BCHW=draws.noise_BCHW[place_B],
        t_B=draws.t_B[place_B],
        condition=_dropped(job, condition, draws.drop_B[place_B], loader.null_text),
        cluster_B=cluster_B,
        kept_BM=None if draws.kept_BM is None else draws.kept_BM[place_B],
    )


def _dropped(job: TrainJob, condition: Condition | TextIds, drop_B: Tensor, null: Text | None) -> Condition | TextIds:
    """The conditions; dropped ones become the null condition."""
    if isinstance(condition, Tensor):
        assert job.null_label is not None
        return condition.masked_fill(drop_B, job.null_label)
    if isinstance(condition, TextIds):
        return replace(condition, dropped_B=drop_B)  # the null text takes their place once they are encoded
    assert null is not None
    return with_null(condition, drop_B, null)
