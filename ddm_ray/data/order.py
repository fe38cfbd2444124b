"""A row's place in orders that depend on its id alone, never on when or where it was made."""

import hashlib
from collections.abc import Iterable

import numpy as np


def places(ids: Iterable[str]) -> np.ndarray:
    """place_N float64 in [0, 1), uniform; the rows of the lowest places are held out."""
    return np.array([int.from_bytes(_digest(row_id)[:6]) / 2**48 for row_id in ids], dtype=np.float64)


def ranks(ids: Iterable[str]) -> np.ndarray:
    """rank_N uint64, uniform and independent of the places: samples and shards are in this order."""
    return np.array([int.from_bytes(_digest(row_id)[8:16]) for row_id in ids], dtype=np.uint64)


def _digest(row_id: str) -> bytes:
    return hashlib.sha256(row_id.encode()).digest()
