"""The order in which rows are trained on: fixed by the seed and the shards' bytes alone.

Row groups are packed into windows in an order drawn for each epoch, and rows are drawn within their window. What fits
in one window is shuffled whole; of more, a window is in memory at a time. B positions of a batch, M of them in one
window, G row groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ddm_ray.core.streams import ORDER, stream

WINDOW_BYTES = 256 * 2**20
"""Least bytes of columns in a window, the epoch's last one apart; so a window is this and at most a row group more."""


@dataclass(frozen=True)
class RowGroup:
    """`number` in the file `file`, of so many rows and (uncompressed) bytes of columns."""

    file: int
    number: int
    rows: int
    bytes: int


@dataclass(frozen=True)
class Window:
    """The row groups (by their places in the list of all) that are shuffled together, in the order they are read."""

    epoch: int
    number: int
    groups: tuple[int, ...]
    rows: int


@dataclass(frozen=True)
class Piece:
    """The part of a batch that lies in one window: member_M of the batch, row_M of its groups put end to end."""

    window: Window
    member_M: np.ndarray
    row_M: np.ndarray


@dataclass(frozen=True)
class _Epoch:
    group_G: np.ndarray
    first_group_W: np.ndarray  # of each window, and the end
    first_row_W: np.ndarray


class WindowOrder:
    """An endless stream of epochs, each of all rows once; any part of it is found without what comes before.

    `groups`: all there are to train on, in the order of their files. Epoch e permutes them by the stream (seed, ORDER,
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

    def locate(self, position_B: np.ndarray) -> list[Piece]:
        """Where the rows at these positions of the stream (int64, from 0) are, in the stream's order of windows."""
        epoch_B, row_B = np.divmod(position_B, self.num_rows)
        pieces = []
        for epoch in np.unique(epoch_B).tolist():
            first_row_W = self._epoch(epoch).first_row_W
            window_B = np.where(epoch_B == epoch, np.searchsorted(first_row_W, row_B, side="right") - 1, -1)
            for number in np.unique(window_B[window_B >= 0]).tolist():
                window = self.window(epoch, number)
                member_M = np.flatnonzero(window_B == number)
                shuffled = _permutation(self._seed, epoch, number, window.rows)
                pieces.append(Piece(window, member_M, shuffled[row_B[member_M] - first_row_W[number]]))
        return pieces

    def window(self, epoch: int, number: int) -> Window:
        """Window `number` of an epoch, counted from 0."""
        found = self._epoch(epoch)
        start, end = found.first_group_W[number : number + 2]
        first, after = found.first_row_W[number : number + 2]
        return Window(epoch, number, tuple(found.group_G[start:end].tolist()), int(after - first))

    def after(self, window: Window) -> Window:
        """The window that follows in the stream."""
        if window.number + 2 < len(self._epoch(window.epoch).first_row_W):
            return self.window(window.epoch, window.number + 1)
        return self.window(window.epoch + 1, 0)

    def stored_row(self, piece: Piece) -> np.ndarray:
        """row_M of all groups in the order of their files, for rows that are all in memory."""
        group_G = np.array(piece.window.groups)
        end_G = np.cumsum(self._rows_G[group_G])
        place_M = np.searchsorted(end_G, piece.row_M, side="right")
        within_M = piece.row_M - (end_G - self._rows_G[group_G])[place_M]
        return self._first_row_G[group_G[place_M]] + within_M

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
