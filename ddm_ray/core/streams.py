"""Random streams by name: what is drawn depends on a seed and a key alone, never on what was drawn before."""

from enum import IntEnum

import numpy as np

NOISE, ROUTING, ORDER, BATCH, INITIAL, REPLAY, AUGMENTATION, HELDOUT, STEP = range(9)
"""First keys of streams: what the numbers are drawn for."""


class SeedPurpose(IntEnum):
    """Use of the seeds of images: each begins elsewhere. The numbers are part of what a run's pictures look like."""

    EVALUATION = 0
    GRID = 1
    EXPERTS = 2
    PREVIEW = 3
    REPLAY = 4


def stream(seed: int, *key: int) -> np.random.Generator:
    """The generator of (seed, key); any other seed or key is independent of it. All are integers from 0 up.

    Not torch's: on the CPU that one takes only 32 bits of its seed.
    """
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(seed, spawn_key=key)))


def consecutive_seeds(seed: int, count: int, purpose: SeedPurpose) -> tuple[int, ...]:
    """Consecutive seeds of images; each (seed, purpose) begins elsewhere in 32 bits."""
    first = int(np.random.SeedSequence([seed, purpose]).generate_state(1)[0])
    return tuple(range(first, first + count))
