"""Orders of rows that depend only on their ids, never on when or where a row was made."""

import hashlib
from collections.abc import Iterable

import numpy as np


def holdout_fractions(ids: Iterable[str]) -> np.ndarray:
    """fraction_N float64 in [0, 1), uniform. Rows with a fraction below `data.heldout` are held out."""
    return np.array([int.from_bytes(_digest(row_id)[:6]) / 2**48 for row_id in ids], dtype=np.float64)


def shuffle_keys(ids: Iterable[str]) -> np.ndarray:
    """key_N uint64, uniform and independent of the holdout fractions. Samples and shards are sorted by it."""
    return np.array([int.from_bytes(_digest(row_id)[8:16]) for row_id in ids], dtype=np.uint64)


def _digest(row_id: str) -> bytes:
    return hashlib.sha256(row_id.encode()).digest()
