"""Samples of rows seen once in a stream: those with the lowest keys, whatever the order of the rows.

N rows that arrive, M of them kept for now, S of the sample.
"""

from typing import Any

import numpy as np

SORTED_COLUMNS = 16
SPARE = 16
"""A sample has one spare slot per SPARE rows. When all are taken, it is cut back to its size."""


def likely_limit(size: int, num_rows: int) -> np.uint64 | None:
    """A key below which `size` of `num_rows` uniform keys lie, except once in 10^15 times; None: take all keys."""
    likely = (size + 8 * np.sqrt(size)) / max(num_rows, 1)
    return np.uint64(likely * 2.0**64) if likely < 0.99 else None


class RowSample:
    """Rows of arrays with the `size` lowest keys (uint64) among all added rows. Pickling keeps only these rows.

    Each row has a slot. To add rows takes time for these rows only: the stored keys are examined once per many rows.
    """

    def __init__(self, size: int):
        self._size, self._num_slots = size, size + size // SPARE
        self._key_S = np.empty(self._num_slots, np.uint64)
        self._free = np.arange(self._num_slots)
        self._limit = np.uint64(2**64 - 1)  # keys above it aren't among the lowest
        self._arrays: list[np.ndarray] = []

    def __reduce__(self) -> tuple[Any, ...]:
        arrays = self.arrays()
        return _sample_of, (self._size, self._key_S[: len(self)], arrays)

    def join(self, other: "RowSample") -> None:
        """Add the rows of another sample of the same size."""
        if arrays := other.arrays():
            self.add(other._key_S[: len(other)], *arrays)

    def __len__(self) -> int:
        return min(self._num_slots - len(self._free), self._size)

    def add(self, key_N: np.ndarray, *arrays: np.ndarray) -> None:
        """Add rows by key: arrays (N, ...), the same arrays in every call."""
        if not self._arrays:
            # Allocates no physical memory yet: pages are taken as rows are written.
            self._arrays = [np.empty((self._num_slots, *array.shape[1:]), array.dtype) for array in arrays]
        row_M = np.flatnonzero(key_N <= self._limit)
        if len(row_M) > len(self._free):
            row_M = row_M[self._cut(key_N[row_M])]
        slot_M, self._free = self._free[: len(row_M)], self._free[len(row_M) :]
        self._key_S[slot_M] = key_N[row_M]
        for held, array in zip(self._arrays, arrays, strict=True):
            held[slot_M] = array[row_M]

    def arrays(self) -> list[np.ndarray]:
        """Each array's rows (S, ...) in key order: views of the sample's memory. Empty if no rows were added."""
        held = self._held()
        slot_S = held[np.argsort(self._key_S[held])][: self._size]
        self._key_S[: len(slot_S)] = self._key_S[slot_S]
        self._free = np.arange(len(slot_S), self._num_slots)
        for array in self._arrays:
            flat = array.reshape(len(array), -1)
            for begin in range(0, flat.shape[1], SORTED_COLUMNS):  # some columns at a time, to avoid a second copy
                columns = slice(begin, begin + SORTED_COLUMNS)
                flat[: len(slot_S), columns] = flat[slot_S, columns]
        return [array[: len(slot_S)] for array in self._arrays]

    def _cut(self, key_M: np.ndarray) -> np.ndarray:
        """Free the slots of all but the lowest keys. Returns kept_M: which offered keys are among the lowest."""
        held = self._held()
        every = np.concatenate([self._key_S[held], key_M])
        kept = np.zeros(len(every), bool)
        kept[np.argpartition(every, self._size - 1)[: self._size]] = True
        self._limit = every[kept].max()
        self._free = np.concatenate([self._free, held[~kept[: len(held)]]])
        return kept[len(held) :]

    def _held(self) -> np.ndarray:
        """Slots in use, in order."""
        taken = np.ones(self._num_slots, bool)
        taken[self._free] = False
        return np.flatnonzero(taken)


def _sample_of(size: int, key_S: np.ndarray, arrays: list[np.ndarray]) -> RowSample:
    sample = RowSample(size)
    if arrays:
        sample.add(key_S, *arrays)
    return sample
