"""The order of training rows: determined by the seed and the shards' bytes alone.

Row groups are packed into windows in an order drawn for each epoch, and rows are drawn within their window. Rows that
fit in one window are shuffled as a whole; otherwise one window is in memory at a time. B positions of a batch, M of
them in one window, G row groups, W windows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ddm_ray.core.streams import ORDER, stream

WINDOW_BYTES = 256 * 2**20
"""Minimum size of a shuffle window in bytes; a window exceeds it by at most one row group.

Only the last window of an epoch may be smaller.
"""


@dataclass(frozen=True)
class RowGroup:
    """Row group `number` of file number `file`: its number of rows, and the uncompressed bytes of its columns."""

    file: int
    number: int
    rows: int
    bytes: int


@dataclass(frozen=True)
class Window:
    """Row groups that are shuffled together, as indices into all row groups, in reading order."""

    epoch: int
    number: int
    groups: tuple[int, ...]
    rows: int


@dataclass(frozen=True)
class WindowSlice:
    """The part of a batch in one window: members member_M of the batch, rows row_M of the window's joined groups."""

    window: Window
    member_M: np.ndarray
    row_M: np.ndarray


@dataclass(frozen=True)
class _Epoch:
    group_G: np.ndarray
    first_group_W: np.ndarray  # of each window, and the end of the last one
    first_row_W: np.ndarray


class WindowOrder:
    """An endless stream of epochs, each with every row once. Any position is located without those before it.

    `groups`: all row groups to train on, in the order of their files. Epoch e permutes them by the stream (seed, ORDER,
    e) and the rows of its window w by (seed, ORDER, e, 1 + w).
    """

    def __init__(self, groups: Sequence[RowGroup], seed: int, window_bytes: int = WINDOW_BYTES):
        self.groups, self._seed, self._window_bytes = groups, seed, window_bytes
        self._rows_G = np.array([group.rows for group in groups], np.int64)
        self._bytes_G = np.array([group.bytes for group in groups], np.int64)
        self._first_row_G = np.cumsum(self._rows_G) - self._rows_G
        self.num_rows = int(self._rows_G.sum())
        self._epochs: dict[int, _Epoch] = {}
        assert self.num_rows

    def locate(self, position_B: np.ndarray) -> list[WindowSlice]:
        """Locate the rows at these positions of the stream (int64, from 0), in the stream's order of windows."""
        epoch_B, row_B = np.divmod(position_B, self.num_rows)
        slices = []
        for epoch in np.unique(epoch_B).tolist():
            first_row_W = self._epoch(epoch).first_row_W
            window_B = np.where(epoch_B == epoch, np.searchsorted(first_row_W, row_B, side="right") - 1, -1)
            for number in np.unique(window_B[window_B >= 0]).tolist():
                window = self.window(epoch, number)
                member_M = np.flatnonzero(window_B == number)
                shuffled = _permutation(self._seed, epoch, number, window.rows)
                slices.append(WindowSlice(window, member_M, shuffled[row_B[member_M] - first_row_W[number]]))
        return slices

    def window(self, epoch: int, number: int) -> Window:
        """Window `number` of an epoch, counted from 0."""
        order = self._epoch(epoch)
        start, end = order.first_group_W[number : number + 2]
        first, after = order.first_row_W[number : number + 2]
        return Window(epoch, number, tuple(order.group_G[start:end].tolist()), int(after - first))

    def after(self, window: Window) -> Window:
        """The window that follows in the stream."""
        if window.number + 2 < len(self._epoch(window.epoch).first_row_W):
            return self.window(window.epoch, window.number + 1)
        return self.window(window.epoch + 1, 0)

    def group(self, part: WindowSlice) -> np.ndarray:
        """Int64 (M,): the index of each row's group among all groups."""
        return np.searchsorted(self._first_row_G, self.stored_row(part), side="right") - 1

    def stored_row(self, part: WindowSlice) -> np.ndarray:
        """row_M as indices into all groups in file order, for rows that are all in memory."""
        group_G = np.array(part.window.groups)
        end_G = np.cumsum(self._rows_G[group_G])
        index_M = np.searchsorted(end_G, part.row_M, side="right")
        within_M = part.row_M - (end_G - self._rows_G[group_G])[index_M]
        return self._first_row_G[group_G[index_M]] + within_M

    def _epoch(self, epoch: int) -> _Epoch:
        if epoch not in self._epochs:
            group_G = stream(self._seed, ORDER, epoch).permutation(len(self.groups))
            bytes_until_G = np.cumsum(self._bytes_G[group_G])
            starts = [0]
            while starts[-1] < len(group_G):
                before = bytes_until_G[starts[-1] - 1] if starts[-1] else 0
                last = int(np.searchsorted(bytes_until_G, before + self._window_bytes))
                starts.append(min(last + 1, len(group_G)))
            rows_until_G = np.concatenate([[0], np.cumsum(self._rows_G[group_G])])
            first_group_W = np.array(starts)
            while len(self._epochs) >= 3:
                del self._epochs[next(iter(self._epochs))]
            self._epochs[epoch] = _Epoch(group_G, first_group_W, rows_until_G[first_group_W])
        return self._epochs[epoch]


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, window: int, rows: int) -> np.ndarray:
    shuffled = stream(seed, ORDER, epoch, 1 + window).permutation(rows)
    shuffled.flags.writeable = False
    return shuffled
