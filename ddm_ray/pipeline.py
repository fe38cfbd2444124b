"""DDMPipeline: images from a finished run in three lines, in the manner of a diffusers pipeline. No Ray.

Shapes: B images, C channels, H, W, S steps.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ddm_ray.config import RunConfig
from ddm_ray.errors import SamplingError
from ddm_ray.sampling.checkpoint import Models, batches, joined, load_models
from ddm_ray.sampling.images import to_pil, to_unit
from ddm_ray.sampling.trajectory import SampleRequest, validate
from ddm_ray.storage.run import Run

Label = int | str | None


@dataclass(frozen=True)
class DDMOutput:
    """Images as asked for, each one's seed, the heaviest expert per step and image, the rows paid for."""

    images: list[Image.Image] | Tensor | np.ndarray
    seeds: tuple[int, ...]
    experts_SB: Tensor
    num_expert_rows: int
    num_router_rows: int


class DDMPipeline:
    """Samples from a run's mixture, or from its monolith, in this process."""

    def __init__(self, config: RunConfig, models: Models):
        self.config = config
        self.models = models

    @classmethod
    def from_run(
        cls, run: str | Run, device: str = "cpu", model: Literal["mixture", "monolith"] = "mixture"
    ) -> "DDMPipeline":
        """A run's finished models, every byte verified. Raises RunError, MissingArtifact, CorruptArtifact."""
        if model not in ("mixture", "monolith"):
            raise SamplingError(f"unknown model {model!r}: use mixture or monolith")
        run = run if isinstance(run, Run) else Run.open(run)
        return cls(run.config, load_models(run, model, device))

    def __call__(
        self,
        class_labels: Sequence[Label],
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        strategy: str | None = None,
        solver: str | None = None,
        seeds: int | Sequence[int] | None = None,
        output_type: Literal["pil", "pt", "np"] = "pil",
        batch_size: int = 256,
        progress: Callable[[float, str], None] | None = None,
    ) -> DDMOutput:
        """One image per label: a class's name or number, or None for unconditional.

        What is None is the run's own setting. `seeds`: one per image, or the first of consecutive ones, or
        None for random ones; an image depends on its own seed alone, not on its batch. "pil" gives L or RGB
        images, "pt" float32 (B, C, H, W) and "np" (B, H, W, C) in [0, 1]. `progress` is called with the
        share that is done and a note. Raises SamplingError for what can't be met.
        """
        defaults = self.config.sample
        request = SampleRequest(
            seeds=_seeds(seeds, len(class_labels)),
            label_B=torch.tensor([self.label(label) for label in class_labels], dtype=torch.int64),
            steps=defaults.steps if num_inference_steps is None else num_inference_steps,
            guidance_scale=defaults.guidance_scale if guidance_scale is None else guidance_scale,
            strategy=self._strategy(strategy),
            solver=defaults.solver if solver is None else solver,
        )
        validate(request, self.models.info)
        if output_type not in ("pil", "pt", "np"):
            raise SamplingError(f"unknown output_type {output_type!r}: use pil, pt or np")
        if batch_size < 1:
            raise SamplingError(f"batch_size is {batch_size}: use 1 or more")
        parts = []
        for batch in batches(request, batch_size):
            parts.append(self.models.sample(batch))
            if progress:
                done = sum(len(part.images_BCHW) for part in parts)
                progress(done / len(request.seeds), f"{done} of {len(request.seeds)} images")
        sampled = joined(parts)
        unit_BCHW = to_unit(sampled.images_BCHW)
        images: list[Image.Image] | Tensor | np.ndarray = unit_BCHW
        if output_type == "pil":
            images = to_pil(unit_BCHW)
        elif output_type == "np":
            images = unit_BCHW.permute(0, 2, 3, 1).numpy()
        return DDMOutput(images, request.seeds, sampled.experts_SB, sampled.num_expert_rows, sampled.num_router_rows)

    def label(self, label: Label) -> int:
        """The model's number of a class given by name or number; None is the null condition."""
        names = self.config.data.class_names
        if label is None:
            return len(names)
        if isinstance(label, str) and label in names:
            return names.index(label)
        if not isinstance(label, str) and 0 <= label < len(names):
            return int(label)
        known = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
        raise SamplingError(f"unknown class {label!r}: use a name ({known}) or a number from 0 to {len(names) - 1}")

    def _strategy(self, strategy: str | None) -> str:
        if self.models.router is not None:
            return self.config.sample.strategy if strategy is None else strategy
        if strategy not in (None, "once"):
            raise SamplingError(f"strategy {strategy!r}: the monolith has no experts to choose from; leave it out")
        return "once"


def _seeds(seeds: int | Sequence[int] | None, num_images: int) -> tuple[int, ...]:
    if seeds is None:
        return tuple(secrets.randbelow(2**32) for _ in range(num_images))
    if isinstance(seeds, int):
        return tuple(range(seeds, seeds + num_images))
    if len(seeds) != num_images:
        raise SamplingError(f"{len(seeds)} seeds for {num_images} labels: give one each, or one to count up from")
    return tuple(int(seed) for seed in seeds)
