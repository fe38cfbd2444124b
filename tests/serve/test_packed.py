"""Segments as bytes: what crosses comes back, and nothing else is taken for it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddm_ray.errors import SamplingError
from ddm_ray.sampling.packing import pack
from ddm_ray.sampling.run_models import mixture_info
from ddm_ray.sampling.trajectory import start
from ddm_ray.serve.batch import Segment
from ddm_ray.serve.packed import ASKED, RUN, pack_asked, pack_segment, unpack_asked, unpack_segment
from ddm_ray.storage.run import Run
from tests.serve.test_versions import OF_ONE


@given(
    seconds=st.none() | st.floats(allow_nan=False),
    until=st.none() | st.integers(0, 10**6),
    needed=st.integers(-1, 1),
    waited_s=st.floats(0, allow_infinity=False),
)
def test_what_crosses_comes_back(
    tiny_run: Run, seconds: float | None, until: int | None, needed: int, waited_s: float
) -> None:
    info = mixture_info(tiny_run)
    rows = start(OF_ONE, info)
    packed = pack(rows)
    back = unpack_asked(pack_asked(packed, seconds, until), info)
    assert (pack(back[0]), *back[1:]) == (packed, seconds, until)
    segment = unpack_segment(pack_segment(Segment(rows, np.full(len(rows), needed), waited_s)), info)
    assert pack(segment.rows) == packed
    assert (segment.needed_B == needed).all() and segment.waited_s == waited_s


def test_other_bytes_are_refused(tiny_run: Run) -> None:
    info = mixture_info(tiny_run)
    rows = start(OF_ONE, info)
    packed, count = pack(rows), len(rows)
    for data in (b"", b"x" * (ASKED.size - 1), pack_asked(packed[:-1], None, None)):
        with pytest.raises(SamplingError, match="these bytes"):
            unpack_asked(data, info)
    needed = np.full(count, info.num_experts, ">i4").tobytes()  # one too many
    for data in (
        b"",
        RUN.pack(0.0, 0) + packed,
        RUN.pack(0.0, count) + needed + packed,
        RUN.pack(0.0, 2**32 - 1) + packed,
    ):
        with pytest.raises(SamplingError, match="these bytes"):
            unpack_segment(data, info)
