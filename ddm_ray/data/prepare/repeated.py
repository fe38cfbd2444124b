"""Finds repeated hashes among those of a hundred million rows, with few in memory at a time."""

import tempfile
from collections.abc import Iterable
from itertools import pairwise
from typing import IO

import numpy as np

from ddm_ray.data.sharded.chunk_store import HASH
from ddm_ray.store.refusals import as_temporary_error

AT_ONCE = 2**22
"""Approximate number of values in memory: 32 MiB, and as much again while they are sorted."""


def values_that_repeat(parts: Iterable[np.ndarray]) -> np.ndarray:
    """The values that occur more than once in these arrays of 64-bit hashes, in ascending order.

    All values are written to a temporary file, which is read once per range of values; hashes spread evenly over the
    ranges. Raises StorageError if the disk is full.
    """
    with as_temporary_error(), tempfile.TemporaryFile() as file:
        count = sum(file.write(part.astype(HASH).tobytes()) for part in parts) // HASH.itemsize
        ranges = max(1, -(-count // AT_ONCE))
        bounds = [number * 2**64 // ranges for number in range(ranges)] + [2**64]
        return np.concatenate([_repeated(_between(file, low, high)) for low, high in pairwise(bounds)])


def _between(file: IO[bytes], low: int, high: int) -> np.ndarray:
    """The file's values from `low` up to but excluding `high`."""
    file.seek(0)
    inside = [np.empty(0, HASH)]
    while data := file.read(AT_ONCE * HASH.itemsize):
        value_N = np.frombuffer(data, HASH)
        inside.append(value_N[(value_N >= np.uint64(low)) & (value_N <= np.uint64(high - 1))])
    return np.concatenate(inside)


def _repeated(value_N: np.ndarray) -> np.ndarray:
    value_N.sort()
    return np.unique(value_N[1:][value_N[1:] == value_N[:-1]])
