"""Draws by the seeds of images: the noise that they begin as, and the chances of strategies.

Shapes: B images, CHW image, K experts.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from ddm_ray.core.streams import NOISE, ROUTING, STEP, stream


def initial_noise(seeds: Sequence[int], shape: tuple[int, int, int], purpose: int = NOISE) -> Tensor:
    """Standard normal float32 (B, *shape), each image by its own seed and the purpose alone, on the CPU."""
    drawn = [stream(seed, purpose).standard_normal(shape, np.float32) for seed in seeds]
    return torch.from_numpy(np.stack(drawn))


def step_noise(seeds: Sequence[int], steps: Sequence[int], shape: tuple[int, ...]) -> Tensor:
    """Standard normal float32 (B, *shape) for a step of each image: by its own seed and step alone, on the CPU."""
    streams = [stream(seed, STEP, step) for seed, step in zip(seeds, steps, strict=True)]
    drawn = [numbers.standard_normal(shape, np.float32) for numbers in streams]
    return torch.from_numpy(np.stack(drawn))


def routing_uniforms(seeds: Sequence[int], num_experts: int, steps: int | Iterable[int]) -> Tensor:
    """Uniforms on [0, 1), float64 (B, K), each image by its own seed and step, in another stream than the noise.

    `steps`: the step of each image, or of all of them.
    """
    each = [steps] * len(seeds) if isinstance(steps, int) else steps
    drawn = [stream(seed, ROUTING, step).random(num_experts) for seed, step in zip(seeds, each, strict=True)]
    return torch.from_numpy(np.stack(drawn))
