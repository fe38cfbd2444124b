"""A rank's part of each global batch: the same rows, noise, times, dropout and kept tokens at any world size."""

import math
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from ddm_ray.core.condition import Condition, Text
from ddm_ray.data.loading.loader import LoadedBatch
from ddm_ray.train.job import TrainJob
from ddm_ray.train.objectives import Batch, draw


class BatchRows(Protocol):
    """A loader, or what stands in for one: rows at places of a global batch, and the null text, if there are texts."""

    @property
    def null_text(self) -> Text | None: ...

    def batch(self, step: int, place_B: Tensor) -> LoadedBatch: ...


class RankBatches:
    """Rank `rank`'s micro-batches of a job. Shares are filled up with rows of weight 0 to be of equal size."""

    def __init__(self, job: TrainJob, loader: BatchRows, rank: int, world: int, micro_batch: int):
        self._job, self._loader = job, loader
        share = math.ceil(job.batch / world)
        place = torch.arange(rank * share, (rank + 1) * share)
        # Gradients are averaged over ranks, so weights of world / batch give the mean over the global batch.
        self._weight_B = (place < job.batch).float() * world / job.batch
        self._place = place % job.batch
        self._parts = torch.arange(share).split(micro_batch)

    def at(self, step: int, device: torch.device) -> Iterator[tuple[Batch, Tensor]]:
        """The micro-batches of global step `step`, each with the weight_B that its losses are summed with."""
        job, train = self._job, self._job.train
        fields = (job.batch, job.image_shape, train.condition_dropout, job.times, job.flow.path, job.masking(step))
        draws = draw(train.seed, job.key, step, *fields)
        for part in self._parts:
            place = self._place[part]
            data_BCHW, condition, cluster_B = self._loader.batch(step, place)
            batch = Batch(
                data_BCHW=data_BCHW.to(device),
                noise_BCHW=draws.noise_BCHW[place].to(device),
                t_B=draws.t_B[place].to(device),
                condition=self._dropped(condition, draws.drop_B[place]).to(device),
                cluster_B=cluster_B.to(device),
                kept_BM=None if draws.kept_BM is None else draws.kept_BM[place].to(device),
            )
            yield batch, self._weight_B[part].to(device)

    def _dropped(self, condition: Condition, drop_B: Tensor) -> Condition:
        """The conditions, the null one where they are dropped."""
        if isinstance(condition, Tensor):
            assert self._job.null_label is not None
            return condition.masked_fill(drop_B, self._job.null_label)
        null = self._loader.null_text
        assert null is not None
        pooled = None
        if condition.pooled_BP is not None and null.pooled_BP is not None:
            pooled = torch.where(drop_B[:, None], null.pooled_BP, condition.pooled_BP)
        tokens_BLE = torch.where(drop_B[:, None, None], null.tokens_BLE, condition.tokens_BLE)
        return Text(tokens_BLE, torch.where(drop_B[:, None], null.mask_BL, condition.mask_BL), pooled)
