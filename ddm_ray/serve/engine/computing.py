"""The networks of a replica: on which device and in which precision they compute, and whether they are compiled.

Shapes: B rows, CHW image.
"""

import logging
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor, nn

from ddm_ray.config import DataConfig, Precision, RunConfig
from ddm_ray.core.condition import Condition, Text
from ddm_ray.core.transfer import frozen_dtype
from ddm_ray.errors import ServeError
from ddm_ray.jobs.published import Weights
from ddm_ray.models.compiled import compile_blocks
from ddm_ray.models.flops import forward_flops_per_row
from ddm_ray.models.network import Network
from ddm_ray.models.spec import experts_by_network
from ddm_ray.models.weights import build
from ddm_ray.remedies import Give
from ddm_ray.run.inputs import beginning_of
from ddm_ray.run.run import Run
from ddm_ray.sampling.buckets import Buckets, Padded, bucket_sizes
from ddm_ray.sampling.cuda_graphs import Graphs
from ddm_ray.sampling.driver import Experts, Field
from ddm_ray.sampling.packed_weights import Packed
from ddm_ray.sampling.request import MixtureInfo
from ddm_ray.sampling.run_models import dtype_of, load_base, load_weights
from ddm_ray.sampling.shared_base import sharing
from ddm_ray.serve.engine.scheduler import MAX_ROWS
from ddm_ray.spelling import one_line

Inputs = tuple[Tensor, Tensor, Condition]
LOG = logging.getLogger("ray.serve")
PROGRESS_S = 5.0


@dataclass(frozen=True)
class Computing:
    """Settings of a replica, as `ServeArgs` has them; `max_rows` of a batch.

    `resident` experts are on the device at a time, the others in host memory; None: all are on the device.
    """

    device: str = "cpu"
    max_rows: int = MAX_ROWS
    precision: Precision | None = None
    compile: bool = False
    resident: int | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Precision of experts and router."""
        return frozen_dtype(self.device) if self.precision is None else dtype_of(self.precision)


class Networks:
    """Networks of published weights as a replica calls them. Each is loaded once, and compiled if settings say so.

    They may be of several runs with images of one form. `packed`: experts in host memory, those of the version that was
    loaded last. The next one loads only what differs.
    """

    packed: Mapping[Weights, Packed] = MappingProxyType({})

    def __init__(self, data: DataConfig, info: MixtureInfo, computing: Computing):
        """`data` and `info` of a run say what calls are like."""
        self.computing = computing
        self._largest = _largest_call(data, info, computing) if computing.compile else None
        self._graphs = None if self._largest is None or not self._largest[0].is_cuda else Graphs(*self._largest)
        self._loaded: dict[Weights, Field] = {}
        self._loading: dict[Weights, threading.Lock] = {}
        self._lock = threading.Lock()
        # As long as an adapter is there, so is its base.
        self._bases, self._loading_base = WeakValueDictionary[str, Network](), threading.Lock()

    def of(self, weights: Weights, run: Run) -> Field:
        """The network of a run's weights. Raises CorruptArtifact, DriftError, and ServeError if it can't be compiled.

        Weights that several runs have are one network.
        """
        with self._lock:
            loading = self._loading.setdefault(weights, threading.Lock())
        with loading:  # a lock of these weights: others needn't wait, which may take minutes
            if (network := self._loaded.get(weights)) is None:
                network = self._load(weights, run)
                with self._lock:
                    self._loaded[weights] = network
            return network

    def experts_of(self, weights_K: Sequence[Weights | None], run: Run) -> Experts:
        """The experts of these weights, None for none. Adapters of one base share its calls. Raises as `of`."""
        experts = [None if weights is None else self.of(weights, run) for weights in weights_K]
        return sharing(experts)

    def _load(self, weights: Weights, run: Run) -> Field:
        offloaded = self.computing.resident is not None and weights.artifact.cluster is not None
        device = "cpu" if offloaded else self.computing.device
        network = load_weights(run, weights, device, self.computing.dtype, self._base_of(weights, run, device))
        if self._largest is None:
            return network
        return in_buckets({weights.artifact: network}, self._largest, self._graphs)[weights.artifact]

    def _base_of(self, weights: Weights, run: Run, device: str) -> Network | None:
        """The base of an adapter, which all of a replica share."""
        if run.config.expert.adapter is None or weights.artifact.kind not in ("expert", "monolith"):
            return None
        digest = run.require(beginning_of(run.config, weights.artifact)[0]).digest
        with self._loading_base:  # not the lock of all: it may take minutes
            if (base := self._bases.get(digest)) is None:
                base = load_base(run, weights.artifact, device, self.computing.dtype)
                assert base is not None
                self._bases[digest] = base
            return base

    def keep(self, needed: Collection[Weights | None]) -> None:
        """Forget all other networks; engines that use one keep it."""
        for weights in list(self._loaded):
            if weights not in needed:
                self.forget(weights)

    def forget(self, weights: Weights) -> None:
        """Forget one network."""
        with self._lock:
            self._loaded.pop(weights, None)
            self._loading.pop(weights, None)


def expert_costs(config: RunConfig) -> np.ndarray | None:
    """Costs of a row of each expert of a run, (K,), in rows of the mean one, by FLOPs; None if all are alike."""
    alike, data = experts_by_network(config), config.data
    if len(alike) == 1:
        return None
    tokens = 0 if data.text is None else data.text.tokens
    flops = {
        cluster: forward_flops_per_row(build(spec, "meta"), data.shape, tokens)
        for spec, clusters in alike
        for cluster in clusters
    }
    flops_K = np.array([flops[cluster] for cluster in config.partition.clusters], np.float64)
    return flops_K / flops_K.mean()


def any_condition(data: DataConfig, count: int) -> Condition:
    """A condition of so many rows, like those of requests."""
    if data.text is None:
        return torch.arange(count) % max(1, data.num_classes or 0)
    tokens, dim, pooled_dim = data.text.tokens, data.text.dim, data.text.pooled_dim
    pooled_BP = None if pooled_dim is None else torch.zeros(count, pooled_dim)
    return Text(torch.zeros(count, tokens, dim), torch.ones(count, tokens, dtype=torch.bool), pooled_BP)


def _largest_call(data: DataConfig, info: MixtureInfo, computing: Computing) -> Inputs:
    """A call of a network for a full batch of guided rows: each row is in it twice."""
    count = 2 * computing.max_rows
    x_BCHW = torch.randn(count, *info.image_shape, dtype=info.dtype, device=computing.device)
    condition = any_condition(data, count).to(computing.device)
    return x_BCHW, torch.linspace(0, 1, count, dtype=info.dtype, device=computing.device), condition


def in_buckets(networks: Mapping[str, nn.Module], largest: Inputs, graphs: Graphs | None) -> dict[str, Buckets]:
    """The networks with their blocks compiled, for calls of a few sizes up to the largest; or as CUDA graphs.

    All code and all graphs are made here, so that no request waits for them. Raises ServeError without a compiler.
    """
    x_BCHW, t_B, condition = largest
    # Imported here: they take 2 s, and are needed for compiling alone.
    from torch._dynamo import config
    from torch._inductor.exc import InductorError

    # Code is compiled for one number of threads: that of an engine.
    torch.set_num_threads(1)
    sizes = bucket_sizes(len(x_BCHW))
    of_size, progress = {name: dict[int, Field]() for name in networks}, Progress(len(networks) * len(sizes))
    for name, network in networks.items():
        compile_blocks(network)
        for size in reversed(sizes):
            # By default torch compiles for 8 shapes and no more.
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
    """Logs how much is compiled, every PROGRESS_S seconds and at the end."""

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
