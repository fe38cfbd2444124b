"""Bytes that a task of partition has: all cores get some, and the driver knows not too many pieces."""

from hypothesis import given
from hypothesis import strategies as st

from ddm_ray.data.partition.file_plan import FILE_BYTES
from ddm_ray.data.partition.ray_data import MAX_GROUPS, MIN_PIECE_BYTES, MIN_TASKS_PER_CORE, sizes_of_tasks

TIB = 2**40


@given(st.integers(1, 8 * TIB), st.integers(1, 1024))
def test_pieces_are_few_and_tasks_enough_for_all_cores(total: int, cores: int) -> None:
    group_bytes, split_bytes = sizes_of_tasks(total, cores, FILE_BYTES)
    groups, splits = -(-total // group_bytes), -(-total // split_bytes)
    assert groups * splits <= (MAX_GROUPS + 1) ** 2
    assert groups >= min(MIN_TASKS_PER_CORE * cores, total, MAX_GROUPS)
    # What a task of either kind has in memory grows where there are so many bytes, or pieces so small, alone.
    assert group_bytes <= max(FILE_BYTES, total // MAX_GROUPS)
    assert split_bytes <= max(group_bytes, MIN_PIECE_BYTES * (groups + 1))
