"""Samples of rows seen once in a stream: those with the lowest keys, the same in whatever order rows come.

N rows that arrive, M of them kept for now, S of the sample.
"""

import numpy as np

SORTED_COLUMNS = 16


class LowestKeys:
    """The `size` lowest of all keys (uint64) that are offered, each in a numbered slot for what belongs to it."""

    def __init__(self, size: int):
        self._size, self._filled = size, 0
        self._key_S = np.empty(size, np.uint64)

    def __len__(self) -> int:
        return self._filled

    def offer(self, key_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(row_M, slot_M): the rows whose keys are kept for now, and the slots that they take over."""
        filled = self._filled
        kept = np.arange(filled + len(key_N))
        if len(kept) > self._size:
            all_keys = np.concatenate([self._key_S[:filled], key_N])
            kept = np.argpartition(all_keys, self._size - 1)[: self._size]
        row_M = kept[kept >= filled] - filled
        self._filled = len(kept)
        slot_M = np.setdiff1d(np.arange(self._filled), kept[kept < filled])
        self._key_S[slot_M] = key_N[row_M]
        return row_M, slot_M

    def sort(self) -> np.ndarray:
        """Number the slots by their keys; slot_S, the former numbers."""
        slot_S = np.argsort(self._key_S[: self._filled])
        self._key_S[: self._filled] = self._key_S[slot_S]
        return slot_S


class RowSample:
    """Arrays' rows of the `size` lowest keys among all rows that are added."""

    def __init__(self, size: int):
        self._size, self._keys = size, LowestKeys(size)
        self._arrays: list[np.ndarray] = []

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key_N: np.ndarray, *arrays: np.ndarray) -> None:
        """Rows by their keys, and arrays (N, ...), the same ones at every call."""
        if not self._arrays:
            # Memory is taken as rows are written to it, not now.
            self._arrays = [np.empty((self._size, *array.shape[1:]), array.dtype) for array in arrays]
        row_M, slot_M = self._keys.offer(key_N)
        for held, array in zip(self._arrays, arrays, strict=True):
            held[slot_M] = array[row_M]

    def arrays(self) -> list[np.ndarray]:
        """Each array's rows (S, ...) in the order of the keys: views of the sample's own memory."""
        slot_S = self._keys.sort()
        views = [held[: len(slot_S)] for held in self._arrays]
        for view in views:
            flat = view.reshape(len(view), -1)
            for begin in range(0, flat.shape[1], SORTED_COLUMNS):  # by columns, so that there's no second copy
                columns = slice(begin, begin + SORTED_COLUMNS)
                flat[:, columns] = flat[slot_S, columns]
        return views
