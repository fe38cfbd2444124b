"""The order of training rows, as a pure function of seed and row groups."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddm_ray.data.loading.windows import RowGroup, WindowOrder

GROUPS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 60)), min_size=1, max_size=12)
SEEDS = st.integers(0, 2**40)
LEAST = st.integers(1, 100)


def groups_of(sizes: list[tuple[int, int]]) -> list[RowGroup]:
    """Row groups of these (rows, bytes), three a file."""
    return [RowGroup(number // 3, number % 3, *size) for number, size in enumerate(sizes)]


def rows_at(order: WindowOrder, positions: np.ndarray) -> np.ndarray:
    """The stored rows at these positions."""
    stored_rows = np.full(len(positions), -1)
    for piece in order.locate(positions):
        assert (stored_rows[piece.member_M] == -1).all()
        stored_rows[piece.member_M] = order.stored_row(piece)
    return stored_rows


@settings(deadline=None)
@given(GROUPS, SEEDS, LEAST, st.integers(1, 3))
def test_every_epoch_has_every_row_once(sizes, seed, window_bytes, num_epochs):
    order = WindowOrder(groups_of(sizes), seed, window_bytes)
    num_rows = sum(rows for rows, _ in sizes)
    assert order.num_rows == num_rows
    stream = rows_at(order, np.arange(num_epochs * num_rows))
    for epoch in range(num_epochs):
        assert sorted(stream[epoch * num_rows : (epoch + 1) * num_rows]) == list(range(num_rows))


@settings(deadline=None)
@given(GROUPS, SEEDS, LEAST, st.integers(0, 10**12), st.lists(st.integers(0, 300), min_size=1, max_size=40))
def test_any_position_is_found_alone(sizes, seed, window_bytes, first, offsets):
    """Whatever was asked before and in whatever order: restarts, world sizes and micro-batches see one stream."""
    positions = first + np.array(offsets)
    together = rows_at(WindowOrder(groups_of(sizes), seed, window_bytes), positions)
    fresh = [rows_at(WindowOrder(groups_of(sizes), seed, window_bytes), positions[[n]]) for n in range(len(offsets))]
    assert (together == np.concatenate(fresh)).all()


@settings(deadline=None)
@given(GROUPS, SEEDS, LEAST)
def test_windows_are_whole_row_groups_and_the_last_one_alone_may_be_small(sizes, seed, window_bytes):
    order = WindowOrder(groups_of(sizes), seed, window_bytes)
    window = order.window(0, 0)
    seen, previous = [], None
    while window.epoch == 0:
        if previous is not None:
            assert sum(sizes[group][1] for group in previous.groups) >= window_bytes
            assert window.number == previous.number + 1
        # Without its last group none would be large enough.
        assert sum(sizes[group][1] for group in window.groups[:-1]) < window_bytes
        assert window.rows == sum(sizes[group][0] for group in window.groups)
        seen += window.groups
        previous, window = window, order.after(window)
    assert sorted(seen) == list(range(len(sizes)))
    assert (window.epoch, window.number) == (1, 0)


def test_the_stream_visits_one_window_after_the_other():
    order = WindowOrder(groups_of([(5, 10)] * 8), 3, 20)
    pieces = [piece for position in range(80) for piece in order.locate(np.array([position]))]
    visited = [(piece.window.epoch, piece.window.number) for piece in pieces]
    assert visited == [(epoch, number) for epoch in (0, 1) for number in range(4) for _ in range(10)]
    assert len({piece.window.groups for piece in pieces}) > 4, "epochs pack other groups together"


def test_orders_differ_by_seed_and_epoch():
    streams = [rows_at(WindowOrder(groups_of([(50, 50)] * 2), seed), np.arange(200)) for seed in (0, 1)]
    orders = {tuple(stream[epoch * 100 : (epoch + 1) * 100]) for stream in streams for epoch in (0, 1)}
    assert len(orders) == 4


def test_the_order_is_the_one_that_runs_were_trained_in():
    """A change here makes every half-trained run go on with other rows."""
    order = WindowOrder(groups_of([(3, 10), (2, 10), (4, 10)]), 7, 15)
    assert rows_at(order, np.arange(18)).tolist() == [8, 2, 5, 1, 7, 6, 0, 3, 4, 5, 8, 6, 0, 2, 1, 7, 3, 4]


@pytest.mark.parametrize("window_bytes", [1000, 20])
def test_positions_are_uniform(window_bytes):
    """Over seeds each row comes first equally often, from one window or from several."""
    firsts = [rows_at(WindowOrder(groups_of([(2, 10)] * 5), seed, window_bytes), np.array([0])) for seed in range(2000)]
    counts = np.bincount(np.concatenate(firsts), minlength=10)
    assert ((counts - 200) ** 2 / 200).sum() < 27.9  # chi-squared of 9 degrees of freedom, p = .001
