"""Shards of a model under DeepSpeed ZeRO: which elements of each parameter a rank keeps, by DeepSpeed's internals."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ddm_ray.models.adapters import trained_parameters

VALUE = "value"
EMA = "ema"
"""Records that training keeps of every parameter, beside the moments of its optimizer, all in fp32."""
SWAPPED = 2**22
"""Elements that `swap_ema` exchanges at once."""


@dataclass(frozen=True)
class Fragment:
    """Elements `start` up to `start + numel` of a flattened parameter: live fp32 views, by record."""

    name: str
    start: int
    numel: int
    records: dict[str, Tensor]

    def part(self, start: int, stop: int) -> "Fragment":
        """Elements of the fragment that lie in [start, stop) of the parameter."""
        start, stop = max(start, self.start), min(stop, self.start + self.numel)
        numel = max(0, stop - start)
        narrowed = {key: view.narrow(0, start - self.start, numel) for key, view in self.records.items() if numel}
        return Fragment(self.name, start, numel, narrowed)


def reduce_nothing(wrapped: Any) -> None:
    """Have ZeRO 1 or 2 in a world of one leave gradients alone: it would copy them, divide by 1 and copy them back."""
    if wrapped.zero_optimization_stage() == 1:
        wrapped.optimizer.buffered_reduce_fallback = lambda *_, **__: None
    elif wrapped.zero_optimization_stage() == 2:
        wrapped.optimizer.average_tensor = lambda *_, **__: None


class Copying(Protocol):
    """A copy of shards that is made beside training."""

    def settle(self) -> None: ...


class Shards:
    """One rank's fp32 partitions of a model under DeepSpeed, and the model's copies of them that compute."""

    def __init__(self, wrapped: Any, optimizer: Any):
        self._wrapped, self._optimizer = wrapped, optimizer
        self._stage: int = wrapped.zero_optimization_stage()
        self.being_copied: Copying | None = None

    def settle(self) -> None:
        """Have the device wait for a copy that is being made before it does further work: then shards may change."""
        if self.being_copied:
            self.being_copied.settle()
        self.being_copied = None

    @property
    def partitions(self) -> list[Tensor]:
        """The tensors that the optimizer updates: flat partitions; at stage 0 the parameters themselves."""
        if self._stage == 0:
            return [parameter for _, parameter in self._parameters()]
        if self._stage < 3:
            return list(self._wrapped.optimizer.single_partition_of_fp32_groups)
        return list(self._wrapped.optimizer.fp32_partitioned_groups_flat)

    def held(self) -> list[Fragment]:
        """All that this rank holds, in the parameters' order."""
        fragments = [self._held(name, parameter) for name, parameter in self._parameters()]
        return [fragment for fragment in fragments if fragment.numel]

    def owned(self) -> list[Fragment]:
        """Fragments that this rank saves: over all ranks every element once."""
        if self._stage > 0:
            return self.held()
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        shares = [-(-fragment.numel // world) for fragment in self.held()]
        parts = [one.part(rank * share, (rank + 1) * share) for one, share in zip(self.held(), shares, strict=True)]
        return [part for part in parts if part.numel]

    def _parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        return trained_parameters(self._wrapped.module).items()

    def _held(self, name: str, parameter: Any) -> Fragment:
        if self._stage == 0:
            return self._views(name, 0, parameter.numel(), parameter, 0)
        if self._stage < 3:
            mapping = parameter._hp_mapping
            if mapping is None:
                return Fragment(name, 0, 0, {})
            low, high = mapping.lp_fragment_address, mapping.hp_fragment_address
            partition = self.partitions[mapping.param_group_index]
            return self._views(name, low.start, low.numel, partition, high.start)
        zero3 = self._wrapped.optimizer
        group, offset, numel = zero3.grad_position[zero3.get_param_id(parameter)]
        start = torch.distributed.get_rank() * numel
        # All ranks' partitions are of equal size: those of the last ranks end with padding.
        numel = max(0, min(numel, parameter.ds_numel - start))
        return self._views(name, start, numel, self.partitions[group], offset)

    def _views(self, name: str, start: int, numel: int, partition: Tensor, offset: int) -> Fragment:
        records, state = (*self._optimizer.moments, EMA), self._optimizer.state[partition]
        kept = {VALUE: partition.detach()} | {record: state[record] for record in records}
        return Fragment(name, start, numel, {key: it.view(-1).narrow(0, offset, numel) for key, it in kept.items()})

    @torch.no_grad()
    def refresh(self) -> None:
        """Make the model's parameters those of the fp32 partitions, on all ranks: every rank must call it."""
        if self._stage in (1, 2):
            self._wrapped.optimizer.update_lp_params()
        elif self._stage == 3:
            zero3 = self._wrapped.optimizer
            zero3.checkpoint_event_prologue()
            for flat, partition in zip(zero3.fp16_partitioned_groups_flat, self.partitions, strict=True):
                flat.copy_(partition)
            for group in range(len(self.partitions)):
                zero3._unflatten_partitioned_parameters(group)
            zero3.checkpoint_event_epilogue()

    @torch.no_grad()
    def swap_ema(self) -> None:
        """Exchange values and EMA, and make the model's parameters the new values; every rank must call it.

        A second call restores everything, to the bit.
        """
        self.settle()
        for partition in self.partitions:
            ema = self._optimizer.state[partition][EMA]
            # In small pieces: a copy of a whole partition may not fit into memory.
            pieces = (each.view(-1).split(SWAPPED) for each in (partition.detach(), ema))
            for own, averaged in zip(*pieces, strict=True):
                value = own.clone()
                own.copy_(averaged)
                averaged.copy_(value)
        self.refresh()

    def computing_otherwise(self) -> list[str]:
        """Names of held fragments that the model computes with other numbers for than their values, rounded."""
        held = self.held()
        if not held:
            return []
        same = torch.stack([self._computes_with(fragment) for fragment in held]).cpu().tolist()
        return [fragment.name for fragment, is_same in zip(held, same, strict=True) if not is_same]

    def _computes_with(self, fragment: Fragment) -> Tensor:
        parameter: Any = self._wrapped.module.get_parameter(fragment.name)
        if self._stage == 3:
            copy = parameter.ds_tensor.view(-1)[: fragment.numel]
        else:
            copy = parameter.detach().view(-1).narrow(0, fragment.start, fragment.numel)
        return (copy == fragment.records[VALUE].to(copy.dtype)).all()
