"""Samples of rows seen once in a stream: those with the lowest keys, the same in whatever order rows come.

N rows that arrive, M of them kept for now, S of the sample.
"""

from typing import Any

import numpy as np

SORTED_COLUMNS = 16
SPARE = 16
"""A sample has one slot more for every so many rows of its size: it is cut back to its size once all are taken."""


class LowestKeys:
    """The `size` lowest of all keys (uint64) that are offered, each in a numbered slot for what belongs to it.

    An offer takes time for its own keys alone: those that are held are looked at once for many offers.
    """

    def __init__(self, size: int):
        self.size = size
        self.num_slots = size + size // SPARE
        self._key_S = np.empty(self.num_slots, np.uint64)
        self._free = np.arange(self.num_slots)
        self._limit = np.uint64(2**64 - 1)  # a higher key isn't among the lowest

    def __len__(self) -> int:
        return min(self.num_slots - len(self._free), self.size)

    def offer(self, key_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(row_M, slot_M): the rows whose keys are kept for now, and the slots that they take over."""
        row_M = np.flatnonzero(key_N <= self._limit)
        if len(row_M) > len(self._free):
            row_M = row_M[self._cut(key_N[row_M])]
        slot_M, self._free = self._free[: len(row_M)], self._free[len(row_M) :]
        self._key_S[slot_M] = key_N[row_M]
        return row_M, slot_M

    @property
    def lowest(self) -> np.ndarray:
        """The keys that are held, after `sort` in its order."""
        keys: np.ndarray = self._key_S[: len(self)]
        return keys

    def sort(self) -> np.ndarray:
        """Keep the lowest alone, and number their slots by their keys; slot_S, the former numbers."""
        held = self._held()
        slot_S = held[np.argsort(self._key_S[held])][: self.size]
        self._key_S[: len(slot_S)] = self._key_S[slot_S]
        self._free = np.arange(len(slot_S), self.num_slots)
        return slot_S

    def _cut(self, key_M: np.ndarray) -> np.ndarray:
        """Free the slots of all but the lowest; kept_M, which of the keys that are offered are among these."""
        held = self._held()
        every = np.concatenate([self._key_S[held], key_M])
        kept = np.zeros(len(every), bool)
        kept[np.argpartition(every, self.size - 1)[: self.size]] = True
        self._limit = every[kept].max()
        self._free = np.concatenate([self._free, held[~kept[: len(held)]]])
        return kept[len(held) :]

    def _held(self) -> np.ndarray:
        """Slots that are taken, in order."""
        taken = np.ones(self.num_slots, bool)
        taken[self._free] = False
        return np.flatnonzero(taken)


def likely_limit(size: int, num_rows: int) -> np.uint64 | None:
    """A key below which as many of so many rows' keys are as are wanted, but for once in 10^15 times; None: all.

    Keys are uniform.
    """
    likely = (size + 8 * np.sqrt(size)) / max(num_rows, 1)
    return np.uint64(likely * 2.0**64) if likely < 0.99 else None


class RowSample:
    """Arrays' rows of the `size` lowest keys among all rows that are added. Pickled it has the rows that it holds."""

    def __init__(self, size: int):
        self._keys = LowestKeys(size)
        self._arrays: list[np.ndarray] = []

    def __reduce__(self) -> tuple[Any, ...]:
        arrays = self.arrays()
        return _sample_of, (self._keys.size, self._keys.lowest, arrays)

    def join(self, other: "RowSample") -> None:
        """Add the rows that another sample, of as many rows, holds."""
        if arrays := other.arrays():
            self.add(other._keys.lowest, *arrays)

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key_N: np.ndarray, *arrays: np.ndarray) -> None:
        """Rows by their keys, and arrays (N, ...), the same ones at every call."""
        if not self._arrays:
            # Memory is taken as rows are written to it, not now.
            self._arrays = [np.empty((self._keys.num_slots, *array.shape[1:]), array.dtype) for array in arrays]
        row_M, slot_M = self._keys.offer(key_N)
        for held, array in zip(self._arrays, arrays, strict=True):
            held[slot_M] = array[row_M]

    def arrays(self) -> list[np.ndarray]:
        """Each array's rows (S, ...) in the order of the keys: views of the sample's own memory. None without rows."""
        slot_S = self._keys.sort()
        for held in self._arrays:
            flat = held.reshape(len(held), -1)
            for begin in range(0, flat.shape[1], SORTED_COLUMNS):  # by columns, so that there's no second copy
                columns = slice(begin, begin + SORTED_COLUMNS)
                flat[: len(slot_S), columns] = flat[slot_S, columns]
        return [held[: len(slot_S)] for held in self._arrays]


def _sample_of(size: int, key_S: np.ndarray, arrays: list[np.ndarray]) -> RowSample:
    sample = RowSample(size)
    if arrays:
        sample.add(key_S, *arrays)
    return sample
