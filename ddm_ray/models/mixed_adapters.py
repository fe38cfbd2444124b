"""One base with the adapters of several networks beside it: rows of different ones share one call.

Shapes: R rows of a call, N tokens of a row, I and O channels in and out of a layer, K adapters, r rank.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ddm_ray.core.condition import Condition
from ddm_ray.models import weights
from ddm_ray.models.adapters import adapted_layers
from ddm_ray.models.network import Network


class AdapterOfRows:
    """Numbers of the adapters that the rows of a call have, int64 (R,)."""

    adapter_R: Tensor


class MixedLinear(nn.Module):
    """x -> W x + b + scale B_k A_k x, with the adapter k that each row has. A: (K, r, I), B: (K, O, r)."""

    a_KrI: Tensor
    b_KOr: Tensor

    def __init__(self, linear: nn.Module, a_KrI: Tensor, b_KOr: Tensor, scale: float, rows: AdapterOfRows) -> None:
        super().__init__()
        self.linear, self.scale, self._rows = linear, scale, rows
        self.register_buffer("a_KrI", a_KrI, persistent=False)
        self.register_buffer("b_KOr", b_KOr, persistent=False)

    @property
    def weight(self) -> Any:
        """The base's, as networks ask a layer for its precision."""
        return self.linear.weight

    def forward(self, x: Tensor) -> Tensor:
        base, adapter_R = self.linear(x), self._rows.adapter_R
        # Rows come first, channels last; all between them are tokens.
        x_RNI = x.flatten(1, -2) if x.ndim > 2 else x[:, None]
        low_RNr = torch.bmm(x_RNI, self.a_KrI[adapter_R].transpose(1, 2))
        b_RrO = self.b_KOr[adapter_R].transpose(1, 2)
        return torch.baddbmm(base.view(*x_RNI.shape[:2], -1), low_RNr, b_RrO, alpha=self.scale).view_as(base)


class MixedAdapters(nn.Module):
    """Adapted networks of one base as one network. `choose` sets the adapter of each row before a call.

    The networks' matrices become views of its own, so that each is in memory once.
    """

    def __init__(self, networks: Sequence[Network]) -> None:
        """`networks`: adapted alike, all of one base (see `weights.from_state`), with which they share its tensors."""
        super().__init__()
        base = networks[0].base
        assert base is not None and all(each.base is base for each in networks)
        self._rows = AdapterOfRows()
        self.network = weights.build(weights.spec_of_model(base), "meta")
        weights.share_tensors(base, self.network)
        for name, layer in adapted_layers(networks[0]).items():
            a_KrI, b_KOr = _stacked([each.get_submodule(name) for each in networks])
            mixed = MixedLinear(self.network.get_submodule(name), a_KrI, b_KOr, layer.scaling["default"], self._rows)
            parent, _, last = name.rpartition(".")
            setattr(self.network.get_submodule(parent), last, mixed)
        self.eval()

    def choose(self, adapter_R: Tensor) -> None:
        """Set the numbers of the adapters that rows have from now on, int64 (R,)."""
        self._rows.adapter_R = adapter_R

    def forward(self, x_RCHW: Tensor, t_R: Tensor, condition: Condition) -> Tensor:
        """Predictions, each row's by the network of its adapter."""
        predicted: Tensor = self.network(x_RCHW, t_R, condition)
        return predicted


@torch.no_grad()
def _stacked(layers: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """The matrices A and B of one layer in all networks; the layers' own become views of them.

    Those that are views already stay: an engine may be computing with them.
    """
    pairs = [(layer.lora_A["default"].weight, layer.lora_B["default"].weight) for layer in layers]
    a_KrI, b_KOr = torch.stack([a_rI for a_rI, _ in pairs]), torch.stack([b_Or for _, b_Or in pairs])
    for k, pair in enumerate(pairs):
        for matrix, stacked in zip(pair, (a_KrI, b_KOr), strict=True):
            if matrix.untyped_storage().nbytes() == matrix.nbytes:
                matrix.data = stacked[k]
    return a_KrI, b_KOr
