"""Calls of a network in a few sizes, so that what is made for a size is made once: compiled code, CUDA graphs.

A continuous batch has another number of rows at almost every velocity. Shapes: B rows of a call, S of its bucket.
"""

from bisect import bisect_left
from collections.abc import Mapping

import torch
from torch import Tensor

from ddm_ray.core.condition import Condition
from ddm_ray.sampling.driver import Field


def bucket_sizes(most: int) -> list[int]:
    """Rows that calls are padded to: powers of two and one and a half times those, up to `most`, the last.

    Less than a third of a call is padding, and a seventh of all calls where each number of rows is as likely. By powers
    of two alone it would be a half and a quarter; but each size more takes seconds to compile, and a graph a network.
    """
    powers = [2**n for n in range(most.bit_length())]
    return sorted({size for power in powers for size in (power, power + power // 2) if size < most} | {most})


class Buckets:
    """A network called with a few numbers of rows only; more rows than the largest are split.

    `of_size[s]` answers calls of at most s rows, as `Padded` and `cuda_graphs.Captured` do.
    """

    def __init__(self, of_size: Mapping[int, Field]):
        self._of_size, self.sizes = of_size, sorted(of_size)

    @torch.inference_mode()
    def __call__(self, x_BCHW: Tensor, t_B: Tensor, condition: Condition) -> Tensor:
        most = self.sizes[-1]
        spans = [slice(begin, begin + most) for begin in range(0, len(x_BCHW), most)]
        parts = [self._answer(x_BCHW[rows], t_B[rows], condition[rows]) for rows in spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _answer(self, x_BCHW: Tensor, t_B: Tensor, condition: Condition) -> Tensor:
        size = self.sizes[bisect_left(self.sizes, len(x_BCHW))]
        return self._of_size[size](x_BCHW, t_B, condition)


class Padded:
    """A network that is called with `size` rows, however few there are: the last one again and again.

    Zeros might make it divide by zero. Rows are independent in the networks, so the others' answers stay.
    """

    def __init__(self, network: Field, size: int):
        self._network, self._size = network, size

    def __call__(self, x_BCHW: Tensor, t_B: Tensor, condition: Condition) -> Tensor:
        count = len(x_BCHW)
        # Made on the device, so that nothing waits. Full calls are copied as well: compiled code is for tensors of one
        # layout, either of inference mode or not.
        rows_S = torch.arange(self._size, device=x_BCHW.device).clamp_(max=count - 1)
        return self._network(x_BCHW[rows_S], t_B[rows_S], condition[rows_S])[:count]
