"""Images of the report: every model on the same seeds, and every expert beside its cluster's rows.

Shapes: B images, CHW image.
"""

from dataclasses import replace

import torch
from PIL import Image
from torch import Tensor

from ddm_ray.config import RunConfig
from ddm_ray.core.streams import SeedPurpose, consecutive_seeds
from ddm_ray.data.loading.loader import Rows
from ddm_ray.evaluate.candidates import Decode
from ddm_ray.pictures.grid import GridRow, grid
from ddm_ray.run.run import Run
from ddm_ray.sampling.request import SampleRequest
from ddm_ray.sampling.run_models import Models, expert_info

MAX_CLASSES, PER_CLASS, PER_CLUSTER = 10, 3, 16
COLUMNS = 12  # minimum: a few classes get more images each


def shown_beside(
    config: RunConfig, rows: Rows, request: SampleRequest, per_class: int = PER_CLASS
) -> tuple[SampleRequest, Tensor, list[str] | None]:
    """A request for at least `per_class` images of each of a few conditions, the real images beside them, and headings.

    The conditions are the first MAX_CLASSES classes of the rows, beside rows spread over each class (repeated if
    there are too few); or the texts of the first rows, each beside its own row. Texts and a single class have no
    headings.
    """
    chosen, classes = [], rows.label_N.unique(sorted=True)[:MAX_CLASSES]
    if rows.text is None:
        each = max(per_class, COLUMNS // len(classes))
        for label in classes:
            own = torch.nonzero(rows.label_N == label)[:, 0]
            chosen.append(own[torch.linspace(0, len(own) - 1, each).round().long()])
        names = config.data.class_names
        headings = [names[label] for label in classes.tolist()] if len(names) > 1 else None
    else:
        chosen = [*torch.arange(min(MAX_CLASSES, len(rows))).repeat_interleave(per_class).split(per_class)]
        headings = None
    row_B = torch.cat(chosen)
    shown = consecutive_seeds(config.evaluate.seed, len(row_B), SeedPurpose.GRID)
    return replace(request, seeds=shown, condition=rows.condition[row_B]), rows.data_NCHW[row_B], headings


def experts_figure(run: Run, mixture: Models, rows: Rows, decode: Decode) -> Image.Image:
    """Two lines per cluster: real rows spread over its classes, and its expert's samples for the same conditions.

    `rows`: rows of images. Clusters without rows are left out.
    """
    config, lines = run.config, []
    for expert, cluster in enumerate(config.partition.clusters):
        members = torch.nonzero(rows.cluster_N == expert)[:, 0]
        if not len(members):
            continue
        members = members[rows.label_N[members].argsort(stable=True)]
        count = min(PER_CLUSTER, len(members))
        spread = members[torch.linspace(0, len(members) - 1, count).round().long()]
        sampled_seeds = consecutive_seeds(config.evaluate.seed, count, SeedPurpose.EXPERTS)
        settings, cluster_B = config.sample.changed(strategy="oracle"), torch.zeros(count, dtype=torch.int64)
        request = SampleRequest(sampled_seeds, rows.condition[spread], settings, cluster_B)
        alone = Models(
            replace(expert_info(run, cluster), null_text=mixture.info.null_text),
            (mixture.experts[expert],),
            None,
            mixture.device,
        )
        lines.append(GridRow(f"cluster {cluster}, real", rows.data_NCHW[spread]))
        lines.append(GridRow(f"expert {cluster}", decode(alone.sample(request).images_BCHW)))
    return grid(lines)
