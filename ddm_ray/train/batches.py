"""A rank's part of each global batch: the same rows, noise, times and dropout at any world size."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ddm_ray.data.loader import Rows, row_order
from ddm_ray.train.job import TrainJob
from ddm_ray.train.objectives import Batch, draw


class RankBatches:
    """Rank `rank`'s micro-batches of a job. Shares are filled up with rows of weight 0 to be of equal size."""

    def __init__(self, job: TrainJob, rows: Rows, rank: int, world: int, micro_batch: int | None):
        self._job, self._rows = job, rows
        share = math.ceil(job.batch / world)
        place = torch.arange(rank * share, (rank + 1) * share)
        # Gradients are averaged over ranks, so weights of world / batch give the mean over the global batch.
        self._weight_B = (place < job.batch).float() * world / job.batch
        self._place = place % job.batch
        self._parts = torch.arange(share).split(min(micro_batch or share, share))
        self.accumulation = len(self._parts)

    def at(self, step: int, device: torch.device) -> Iterator[tuple[Batch, Tensor]]:
        """The micro-batches of global step `step`, each with the weight_B that its losses are summed with."""
        job, rows, train = self._job, self._rows, self._job.train
        draws = draw(
            train.seed, job.key, step, job.batch, job.image_shape, train.condition_dropout, job.times, job.flow.path
        )
        order = row_order(train.seed, len(rows.label_N), step, job.batch)
        for part in self._parts:
            place = self._place[part]
            row = order[place]
            batch = Batch(
                data_BCHW=rows.data_NCHW[row].to(device),
                noise_BCHW=draws.noise_BCHW[place].to(device),
                t_B=draws.t_B[place].to(device),
                condition=rows.label_N[row].masked_fill(draws.drop_B[place], job.null_label).to(device),
                cluster_B=rows.cluster_N[row].to(device),
            )
            yield batch, self._weight_B[part].to(device)
