"""Images of the report: every model on the same seeds, and every expert beside its cluster.

Shapes: B images, CHW image.
"""

from dataclasses import replace

import torch
from PIL import Image
from torch import Tensor

from ddm_ray.config import RunConfig
from ddm_ray.core.streams import SeedPurpose, seeds
from ddm_ray.data.loading.loader import Rows
from ddm_ray.evaluate.candidates import Decode
from ddm_ray.pictures.grid import GridRow, grid
from ddm_ray.sampling.request import SampleRequest
from ddm_ray.sampling.run_models import Models, monolith_info
from ddm_ray.storage.run import Run

MAX_CLASSES, PER_CLASS, PER_CLUSTER = 10, 3, 16


def labels_B(request: SampleRequest) -> Tensor:
    """The request's class labels, int64 (B,)."""
    assert isinstance(request.condition, Tensor)
    return request.condition


def class_request(config: RunConfig, train: Rows, request: SampleRequest) -> SampleRequest:
    """Request like `request` for PER_CLASS images of each of the first MAX_CLASSES classes with training rows."""
    label_B = train.label_N.unique(sorted=True)[:MAX_CLASSES].repeat_interleave(PER_CLASS)
    return replace(request, seeds=seeds(config.evaluate.seed, len(label_B), SeedPurpose.GRID), condition=label_B)


def real_images(train: Rows, request: SampleRequest) -> Tensor:
    """The first training rows of each class of a `class_request`, repeated if a class has fewer than PER_CLASS."""
    chosen = []
    for label in labels_B(request)[::PER_CLASS]:
        rows = torch.nonzero(train.label_N == label)[:, 0]
        chosen.append(rows[torch.arange(PER_CLASS) % len(rows)])
    return train.data_NCHW[torch.cat(chosen)]


def experts_figure(run: Run, mixture: Models, train: Rows, decode: Decode) -> Image.Image:
    """Two lines for each cluster: real rows spread over its classes, and its expert's samples of the same labels.

    `train`: training rows whose data are images.
    """
    config, rows = run.config, []
    for cluster in range(mixture.info.num_experts):
        members = torch.nonzero(train.cluster_N == cluster)[:, 0]
        members = members[train.label_N[members].argsort(stable=True)]
        count = min(PER_CLUSTER, len(members))
        spread = members[torch.linspace(0, len(members) - 1, count).round().long()]
        sampled_seeds = seeds(config.evaluate.seed, count, SeedPurpose.EXPERTS)
        request = SampleRequest(sampled_seeds, train.label_N[spread], config.sample.changed(strategy="once"))
        alone = Models(monolith_info(run), (mixture.experts[cluster],), None, mixture.device)
        rows.append(GridRow(f"cluster {cluster}, real", train.data_NCHW[spread]))
        rows.append(GridRow(f"expert {cluster}", decode(alone.sample(request).images_BCHW)))
    return grid(rows)
