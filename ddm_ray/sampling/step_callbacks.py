"""The ends of a pipeline's steps: a callback in diffusers' form that may change images, and a bar of progress.

Shapes: B images.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddm_ray.errors import SamplingError

TENSORS = ("latents",)
"""Names of tensors that a callback may ask for."""
StepCallback = Callable[[Any, int, float, dict[str, Tensor]], dict[str, Tensor] | None]


def tensor_inputs(callback: StepCallback | None, named: Sequence[str]) -> tuple[str, ...]:
    """Names of the tensors that a callback is given: those of a callback of diffusers' are its own."""
    names = tuple(getattr(callback, "tensor_inputs", named))
    if unknown := [name for name in names if name not in TENSORS]:
        raise SamplingError(
            f"callback_on_step_end_tensor_inputs: no tensor {unknown[0]!r:.60}: use {', '.join(TENSORS)}; guidance is"
            " ended by guidance_interval"
        )
    return names


@dataclass
class StepEnds:
    """The end of each step of a call, as `OnStep` hears of it; `bar` counts `num_steps` of each of all the images.

    What the callback returns is taken up: other latents of the same shape. SamplingError for what else it returns.
    """

    pipeline: Any
    callback: StepCallback | None
    names: tuple[str, ...]
    bar: Any
    num_images: int
    num_steps: int
    done: int = 0

    def __call__(self, step: int, t: float, x_BCHW: Tensor) -> Tensor | None:
        changed_BCHW = None
        if self.callback is not None:
            given = dict.fromkeys(self.names, x_BCHW)
            answer = self.callback(self.pipeline, step, t, given)
            # In any case, since it may have written to what it was given.
            changed_BCHW = self._latents(answer, x_BCHW)
        self.done += len(x_BCHW)
        self.bar.update(self.done * self.bar.total // (self.num_images * self.num_steps) - self.bar.n)
        return changed_BCHW

    def _latents(self, answer: Any, x_BCHW: Tensor) -> Tensor:
        if answer is not None and not isinstance(answer, dict):
            raise SamplingError(
                f"callback_on_step_end returned a {type(answer).__name__}: let it return the dict that it was given, or"
                " None"
            )
        latents = (answer or {}).get("latents", x_BCHW)
        if not isinstance(latents, Tensor) or latents.shape != x_BCHW.shape:
            what = tuple(latents.shape) if isinstance(latents, Tensor) else type(latents).__name__
            raise SamplingError(f"callback_on_step_end returned latents of {what}: they are of {tuple(x_BCHW.shape)}")
        latents = latents.to(x_BCHW)
        if not torch.isfinite(latents).all():
            raise SamplingError("callback_on_step_end left latents that aren't finite")
        return latents
