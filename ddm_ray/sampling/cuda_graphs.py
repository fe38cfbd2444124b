"""CUDA graphs of networks: a whole call is one launch, however many kernels it has.

Shapes: B rows of a call, CHW image.
"""

import threading

import torch
from torch import Tensor

from ddm_ray.core.condition import Condition, Text, join
from ddm_ray.sampling.driver import Field

WARM_UPS = 2
_CAPTURING = threading.Lock()
"""Torch captures one graph at a time in a process."""


class Graphs:
    """Captures calls of networks, which share the inputs' places and the memory of what they compute on the way.

    So one runs at a time: whichever threads call them, they do so on one stream, as a thread's default one is.
    """

    def __init__(self, x_BCHW: Tensor, t_B: Tensor, condition: Condition):
        """Make places for calls of as many rows at most, alike in all other dimensions and on this device."""
        self._inputs = (x_BCHW.clone(), t_B.clone(), join([condition]))
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(x_BCHW.device)
        self._replaying = threading.Lock()

    def captured(self, network: Field, size: int) -> "Captured":
        """Capture a call of `size` rows of a network; its weights stay where they are from now on.

        The largest size first: the others then find room in its memory.
        """
        x_BCHW, t_B, condition = self._inputs
        inputs = x_BCHW[:size], t_B[:size], condition[:size]
        graph = torch.cuda.CUDAGraph()
        with _CAPTURING, torch.cuda.device(x_BCHW.device), torch.inference_mode():
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                # What is made at a first use is no part of a graph: code, tables, workspaces of libraries.
                for _ in range(WARM_UPS):
                    network(*inputs)
            # Other threads may go on computing meanwhile.
            mode = "thread_local"
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode=mode):
                answer = network(*inputs)
        return Captured(network, graph, _tensors(*inputs), answer, self._replaying)


class Captured:
    """A captured call of a network, for as many rows as it has or fewer; it takes as long in either case."""

    def __init__(
        self,
        network: Field,
        graph: torch.cuda.CUDAGraph,
        inputs: list[Tensor],
        answer: Tensor,
        replaying: threading.Lock,
    ):
        self._network = network  # kept, since the graph knows its weights by their addresses alone
        self._graph, self._inputs, self._answer, self._replaying = graph, inputs, answer, replaying

    @torch.inference_mode()
    def __call__(self, x_BCHW: Tensor, t_B: Tensor, condition: Condition) -> Tensor:
        count, given = len(x_BCHW), _tensors(x_BCHW, t_B, condition)
        with self._replaying:
            # The rows beyond keep what was there last, which were rows as good as these.
            for own, tensor in zip(self._inputs, given, strict=True):
                assert tensor.shape[1:] == own.shape[1:], (tensor.shape, own.shape)
                own[:count].copy_(tensor)
            self._graph.replay()
            # The next graph computes in the same memory.
            return self._answer[:count].clone()


def _tensors(x_BCHW: Tensor, t_B: Tensor, condition: Condition) -> list[Tensor]:
    """All tensors of a call."""
    if not isinstance(condition, Text):
        return [x_BCHW, t_B, condition]
    pooled = [] if condition.pooled_BP is None else [condition.pooled_BP]
    return [x_BCHW, t_B, condition.tokens_BLE, condition.mask_BL, *pooled]
