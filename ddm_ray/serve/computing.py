"""Ways in which a replica's networks compute: where, in which precision, and compiled in sizes that are kept or not.

Shapes: B rows, CHW image.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ddm_ray.config import Precision
from ddm_ray.core.condition import Condition
from ddm_ray.errors import Give, ServeError, one_line
from ddm_ray.models.compiled import compile_blocks
from ddm_ray.sampling.buckets import Buckets, Padded, bucket_sizes
from ddm_ray.sampling.driver import Field
from ddm_ray.sampling.graphs import Graphs

LOG = logging.getLogger("ray.serve")
PROGRESS_S = 5.0


@dataclass(frozen=True)
class Computing:
    """Settings of a replica, as `ServeArgs` has them; `max_rows` of a batch."""

    device: str = "cpu"
    max_rows: int = 32
    precision: Precision = "fp32"
    compile: bool = False


def in_buckets(
    networks: Mapping[str, nn.Module], x_BCHW: Tensor, t_B: Tensor, condition: Condition
) -> dict[str, Buckets]:
    """The networks with their blocks compiled, for calls of a few sizes up to this one's; on a GPU as CUDA graphs.

    All code and all graphs are made here, so that no request waits for them. ServeError without a compiler.
    """
    # Whoever doesn't compile needn't wait 2 s for them.
    from torch._dynamo import config
    from torch._inductor.exc import InductorError

    # Code is made for one number of threads: an engine's.
    torch.set_num_threads(1)
    sizes = bucket_sizes(len(x_BCHW))
    of_size, progress = {name: dict[int, Field]() for name in networks}, Progress(len(networks) * len(sizes))
    graphs = Graphs(x_BCHW, t_B, condition) if x_BCHW.is_cuda else None
    for name, network in networks.items():
        compile_blocks(network)
        for size in reversed(sizes):
            # Else torch compiles for 8 shapes, and for no more.
            with config.patch(recompile_limit=config.accumulated_recompile_limit):
                try:
                    if graphs is None:
                        of_size[name][size] = Padded(network, size)
                        Buckets(of_size[name])(x_BCHW[:size], t_B[:size], condition[:size])
                    else:
                        of_size[name][size] = graphs.captured(network, size)
                except InductorError as error:
                    fix = Give("compile", "install a C++ compiler (g++), or leave this out")
                    reason = one_line(str(error).partition("\n")[0], 200)
                    raise ServeError(f"{name} can't be compiled: {reason}", fix) from None
            progress.made(f"{name} for {size} rows")
    return {name: Buckets(calls) for name, calls in of_size.items()}


class Progress:
    """Tells the log how much is compiled, every PROGRESS_S seconds and at the end."""

    def __init__(self, count: int):
        self._count, self._made = count, 0
        self._began = self._last_line = time.monotonic()

    def made(self, what: str) -> None:
        """Count one more."""
        self._made, now = self._made + 1, time.monotonic()
        if self._made == self._count or now - self._last_line >= PROGRESS_S:
            self._last_line = now
            seconds = now - self._began
            LOG.info("compiled %d of %d calls in %.0f s, lastly %s", self._made, self._count, seconds, what)
