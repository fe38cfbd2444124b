"""What a pipeline is called with, in the forms that callers of diffusers pipelines know, checked one by one.

Shapes: B images.
"""

import math
import operator
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddm_ray.core.condition import Condition, Text, join
from ddm_ray.errors import SamplingError, TimeError
from ddm_ray.models.text import TextEncoder


class Conditions:
    """What a call's prompts or labels ask for, in `words`; the condition itself is made for a batch at a time.

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


def listed(given: Any) -> list[Any]:
    """The elements of a list, tensor, array or other collection; a string or a single thing as a list of one."""
    if isinstance(given, Tensor | np.ndarray):
        given = given.tolist()
    return list(given) if isinstance(given, Iterable) and not isinstance(given, str | bytes) else [given]


def integer(value: Any) -> int | None:
    """A whole number of Python's, numpy's or torch's as an int; None for all else, True and False too."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except (TypeError, ValueError):
        return None


def count(name: str, value: Any) -> int:
    """A whole number from 1."""
    found = integer(value)
    if found is None or found < 1:
        raise SamplingError(f"{name} is {value!r:.60}: use a whole number, 1 or more")
    return found


def number(name: str, value: Any) -> float:
    """A finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not math.isfinite(value):
        raise SamplingError(f"{name} is {value!r:.60}: use a finite number")
    return float(value)


def interval(name: str, value: Any) -> tuple[float, float]:
    """Two finite numbers."""
    ends = listed(value)
    if len(ends) != 2:
        raise TimeError(f"{name} is {value!r:.60}: use two times in [0, 1], the smaller one first")
    low, high = (number(name, end) for end in ends)
    return low, high


def word(name: str, value: Any) -> str:
    """A name."""
    if not isinstance(value, str):
        raise SamplingError(f"{name} is {value!r:.60}: use a name")
    return value


def texts(prompt: Any) -> list[str]:
    """The prompts of a text model; None among several is the empty one."""
    prompts = ["" if one is None else one for one in listed(prompt)]
    if not prompts:
        raise SamplingError("prompt is empty: give at least one text")
    for one in prompts:
        if not isinstance(one, str):
            raise SamplingError(f"prompt {one!r:.60} is no text: give a string, or a list of strings")
    return prompts


def seeds(given: Any, generator: Any, num_images: int) -> tuple[int, ...]:
    """One an image: as given, counted up from one that is, drawn from the generator, or drawn at random."""
    if given is not None and generator is not None:
        raise SamplingError("give either seeds or a generator: seeds are drawn from it")
    if generator is not None:
        if not isinstance(generator, torch.Generator):
            raise SamplingError("generator must be one torch.Generator: for an image each give seeds=[...]")
        drawn = torch.randint(0, 2**32, (num_images,), generator=generator, device=generator.device)
        return tuple(drawn.tolist())
    if given is None:
        return tuple(secrets.randbelow(2**32) for _ in range(num_images))
    first = integer(given)
    found = listed(given) if first is None else list(range(first, first + num_images))
    whole = [integer(seed) for seed in found]
    if (first is None and not isinstance(given, Iterable)) or isinstance(given, str | bytes) or None in whole:
        raise SamplingError(f"seeds are {given!r:.60}: use whole numbers, one an image, or one to count up from")
    if len(found) != num_images:
        raise SamplingError(f"{len(found)} seeds for {num_images} images: give one each, or one to count up from")
    told = tuple(seed for seed in whole if seed is not None)
    if any(not 0 <= seed < 2**64 for seed in told):
        raise SamplingError("seeds must be from 0 to 2^64 - 1")
    return told


def clusters(given: Any, strategy: str, num_prompts: int, num_experts: int) -> Tensor | None:
    """Int64, one a prompt, for the strategy oracle, which alone takes them; None for others."""
    if strategy != "oracle":
        if given is not None:
            raise SamplingError(f"clusters are for strategy oracle, the strategy is {strategy}: leave them out")
        return None
    if given is None:
        raise SamplingError(f"strategy oracle needs clusters: one from 0 to {num_experts - 1}, or one a prompt")
    one = integer(given)
    found = [one] * num_prompts if one is not None else [integer(cluster) for cluster in listed(given)]
    if len(found) != num_prompts:
        raise SamplingError(f"{len(found)} clusters for {num_prompts} prompts: give one each, or one for all")
    whole = [cluster for cluster in found if cluster is not None and 0 <= cluster < num_experts]
    if len(whole) < num_prompts:
        raise SamplingError(f"clusters are {given!r:.60}: use whole numbers from 0 to {num_experts - 1}")
    return torch.tensor(whole, dtype=torch.int64)
