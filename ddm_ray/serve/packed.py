"""Segments to run, and segments that were run, as bytes for another process: a few numbers, then packed rows.

Shapes: B rows.
"""

import math
import struct

import numpy as np
import torch

from ddm_ray.errors import SamplingError
from ddm_ray.sampling.packing import pack, unpack
from ddm_ray.sampling.request import MixtureInfo
from ddm_ray.sampling.state import Trajectories
from ddm_ray.serve.batch import Segment

ASKED = struct.Struct("!dq")
"""Seconds (nan: not said) and the velocity at which it ends (-1: not said)."""
RUN = struct.Struct("!dI")
"""Seconds that it waited, and how many rows it has."""


def pack_asked(packed: bytes, seconds: float | None, until: int | None) -> bytes:
    """Pack what `BatchEngine.submit` is to be given, around packed rows."""
    return ASKED.pack(math.nan if seconds is None else seconds, -1 if until is None else until) + packed


def unpack_asked(
    data: bytes, info: MixtureInfo, device: torch.device | str = "cpu"
) -> tuple[Trajectories, float | None, int | None]:
    """Rows of this mixture, seconds and until, as `pack_asked` packed them. SamplingError for other bytes."""
    if len(data) < ASKED.size:
        raise SamplingError("these bytes ask for no segment")
    seconds, until = ASKED.unpack_from(data)
    rows = unpack(data[ASKED.size :], info, device)
    return rows, None if math.isnan(seconds) else seconds, None if until < 0 else until


def pack_segment(segment: Segment) -> bytes:
    """Pack a segment that was run."""
    needed = segment.needed_B.astype(">i4").tobytes()
    return RUN.pack(segment.waited_s, len(segment.needed_B)) + needed + pack(segment.rows)


def unpack_segment(data: bytes, info: MixtureInfo) -> Segment:
    """The segment that `pack_segment` packed. SamplingError for bytes that aren't one of this mixture."""
    if len(data) < RUN.size:
        raise SamplingError("these bytes are no segment")
    waited_s, count = RUN.unpack_from(data)
    end = RUN.size + 4 * count
    rows = unpack(data[end:], info)
    needed_B = np.frombuffer(data[RUN.size : end], ">i4").astype(np.int64)
    if len(needed_B) != len(rows) or not ((needed_B >= -1) & (needed_B < info.num_experts)).all():
        raise SamplingError("these bytes are no segment: not one expert or none for each row")
    return Segment(rows, needed_B, waited_s)
