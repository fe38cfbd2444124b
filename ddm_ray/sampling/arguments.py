"""Arguments of a pipeline's call, in the forms that callers of diffusers pipelines know.

Shapes: B images.
"""

import inspect
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddm_ray.core.condition import Condition, Text, join
from ddm_ray.errors import SamplingError
from ddm_ray.models.text import TextEncoder
from ddm_ray.sampling.devices import choose_device
from ddm_ray.sampling.labels import integer
from ddm_ray.sampling.request import require_seeds
from ddm_ray.spelling import numbers_in_words


class PromptConditions:
    """The conditions of a call, in `words`; the tensors are made for a batch at a time.

    `source`: labels or texts, one a prompt, or the encoder of `words`. Encoded texts are large: a batch's distinct
    ones are encoded once, and kept for the next batch alone.
    """

    def __init__(self, words: Sequence[str], source: Tensor | Text | TextEncoder) -> None:
        self.words, self.source = tuple(words), source
        self._encoded: dict[str, Text] = {}

    def __len__(self) -> int:
        return len(self.words)

    def of(self, rows: Sequence[int]) -> Condition:
        """Of the prompts with these numbers, on the CPU."""
        if not isinstance(self.source, TextEncoder):
            return self.source[torch.tensor(rows, dtype=torch.int64)]
        distinct = list(dict.fromkeys(self.words[row] for row in rows))
        if new := [words for words in distinct if words not in self._encoded]:
            text = self.source.encode(new).to("cpu")
            self._encoded |= {words: text[[number]] for number, words in enumerate(new)}
        self._encoded = {words: self._encoded[words] for words in distinct}
        place = {words: number for number, words in enumerate(distinct)}
        return join(list(self._encoded.values()))[torch.tensor([place[self.words[row]] for row in rows])]


def names_of(function: Callable[..., Any]) -> list[str]:
    """The names of a function's arguments, those of its `**settings` apart."""
    parameters = inspect.signature(function).parameters.values()
    return [each.name for each in parameters if each.kind is not each.VAR_KEYWORD]


def listed(given: Any) -> list[Any]:
    """The elements of a list, tensor, array or other collection; a string or a single thing as a list of one."""
    if isinstance(given, Tensor | np.ndarray):
        given = given.tolist()
    return list(given) if isinstance(given, Iterable) and not isinstance(given, str | bytes) else [given]


def integers(given: Any) -> tuple[int, ...] | None:
    """The whole numbers of a list, tensor or array; None for all else, a single one too."""
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        return None
    values = [integer(one) for one in listed(given)]
    return None if None in values else tuple(value for value in values if value is not None)


def count(name: str, value: Any) -> int:
    """A whole number from 1."""
    whole_number = integer(value)
    if whole_number is None or whole_number < 1:
        raise SamplingError(f"{name} is {value!r:.60}: use a whole number, 1 or more")
    return whole_number


def given_texts(prompt: Any) -> list[str]:
    """The prompts of a text model; None among several is the empty one."""
    prompts = ["" if one is None else one for one in listed(prompt)]
    if not prompts:
        raise SamplingError("prompt is empty: give at least one text")
    for one in prompts:
        if not isinstance(one, str):
            raise SamplingError(f"prompt {one!r:.60} is no text: give a string, or a list of strings")
    return prompts


def given_seeds(given: Any, generator: Any, num_images: int) -> tuple[int, ...]:
    """One seed an image: as given, counted up from one that is, drawn from the generator or from one an image, or drawn
    at random.
    """
    if given is not None and generator is not None:
        raise SamplingError("give either seeds or a generator: seeds are drawn from it")
    if generator is not None:
        return _drawn(listed(generator), num_images)
    if given is None:
        return tuple(secrets.randbelow(2**32) for _ in range(num_images))
    first = integer(given)
    values = integers(given) if first is None else tuple(range(first, first + num_images))
    if values is None:
        raise SamplingError(f"seeds are {given!r:.60}: use whole numbers, one an image, or one to count up from")
    if len(values) != num_images:
        raise SamplingError(f"{len(values)} seeds for {num_images} images: give one each, or one to count up from")
    require_seeds(values)
    return values


def _drawn(generators: list[Any], num_images: int) -> tuple[int, ...]:
    if not generators or not all(isinstance(one, torch.Generator) for one in generators):
        raise SamplingError("generator must be a torch.Generator, or a list of them, one an image")
    if len(generators) not in (1, num_images):
        raise SamplingError(f"{len(generators)} generators for {num_images} images: give one each, or one for all")
    each = num_images // len(generators)
    drawn = [torch.randint(0, 2**32, (each,), generator=one, device=one.device).tolist() for one in generators]
    return tuple(seed for part in drawn for seed in part)


def given_noise(latents: Any, shape: tuple[int, ...]) -> Tensor | None:
    """Float (B, C, H, W) of standard normal noise, or None where there is none."""
    if latents is None:
        return None
    if not isinstance(latents, Tensor) or not latents.is_floating_point():
        raise SamplingError(f"latents are {type(latents).__name__}: give a tensor of floats, standard normal noise")
    if tuple(latents.shape) != shape:
        raise SamplingError(f"latents are of shape {tuple(latents.shape)}: these images begin as noise of {shape}")
    if not latents.isfinite().all():
        raise SamplingError("latents aren't finite: give standard normal noise")
    return latents


def negatives(given: Any, num_prompts: int) -> tuple[str, ...]:
    """One text a prompt, "" where there is none: as given, or one that is for all."""
    values = given_texts(given) if given is not None else [""]
    if len(values) not in (1, num_prompts):
        raise SamplingError(f"{len(values)} negative prompts for {num_prompts} prompts: give one each, or one for all")
    return tuple(values * (num_prompts // len(values)))


def destination(places: Sequence[Any], device: Any = None, dtype: Any = None) -> tuple[str | None, Any]:
    """Device and dtype of a call of `to`, in any of the forms that diffusers and torch know; None for what stays."""
    for place in (place for place in places if place is not None):
        is_dtype = isinstance(place, torch.dtype)
        if (dtype if is_dtype else device) is not None:
            raise SamplingError("to takes one device and one dtype")
        device, dtype = (device, place) if is_dtype else (place, dtype)
    return None if device is None else choose_device(device), dtype


def clusters(given: Any, num_prompts: int, numbers: tuple[int, ...]) -> Tensor:
    """Int64, one a prompt: positions of the experts with these numbers."""
    one = integer(given)
    values = integers(given) if one is None else (one,) * num_prompts
    if values is not None and len(values) != num_prompts:
        raise SamplingError(f"{len(values)} clusters for {num_prompts} prompts: give one each, or one for all")
    if values is None or not set(numbers).issuperset(values):
        raise SamplingError(f"clusters are {given!r:.60}: use whole numbers from {numbers_in_words(numbers)}")
    return torch.tensor([numbers.index(cluster) for cluster in values], dtype=torch.int64)
