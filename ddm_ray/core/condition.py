"""The condition of an image: a class label, or a text as its encoder's tokens.

Shapes: B rows, L tokens, E and P channels of the encoder's tokens and of its pooled vector.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False, repr=False)
class Text:
    """Texts of B rows: the encoder's tokens, which of them count (bool, one a row at least), a pooled vector.

    It is indexed, moved and measured as a tensor of B rows is.
    """

    tokens_BLE: Tensor
    mask_BL: Tensor
    pooled_BP: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.tokens_BLE.ndim == 3
        assert self.mask_BL.shape == self.tokens_BLE.shape[:2]

    def __repr__(self) -> str:
        rows, tokens, dim = self.tokens_BLE.shape
        pooled = "" if self.pooled_BP is None else f", pooled to {self.pooled_BP.shape[1]}"
        return f"Text({rows} texts of {tokens} tokens of {dim}{pooled}, {self.tokens_BLE.dtype})"

    def __len__(self) -> int:
        return len(self.tokens_BLE)

    def __getitem__(self, rows: Any) -> "Text":
        pooled = None if self.pooled_BP is None else self.pooled_BP[rows]
        return Text(self.tokens_BLE[rows], self.mask_BL[rows], pooled)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Text":
        pooled = None if self.pooled_BP is None else self.pooled_BP.to(device, non_blocking=non_blocking)
        return Text(
            self.tokens_BLE.to(device, non_blocking=non_blocking),
            self.mask_BL.to(device, non_blocking=non_blocking),
            pooled,
        )

    def pin_memory(self) -> "Text":
        pooled = None if self.pooled_BP is None else self.pooled_BP.pin_memory()
        return Text(self.tokens_BLE.pin_memory(), self.mask_BL.pin_memory(), pooled)


@dataclass(frozen=True, eq=False, repr=False)
class TextIds:
    """Texts of B rows that are yet to be encoded: their tokens' ids (int64), and which of them count.

    `pooled`: those for the encoder of the pooled vector, where that is another. `dropped_B`: rows that are to have the
    null condition. It is moved and measured as a tensor of B rows is.
    """

    ids_BL: Tensor
    mask_BL: Tensor
    pooled: "TextIds | None" = None
    dropped_B: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.mask_BL.shape == self.ids_BL.shape

    def __repr__(self) -> str:
        return f"TextIds({len(self.ids_BL)} texts of {self.ids_BL.shape[1]} tokens)"

    def __len__(self) -> int:
        return len(self.ids_BL)

    def __getitem__(self, rows: Any) -> "TextIds":
        return self._each(lambda tensor: tensor[rows])

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "TextIds":
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "TextIds":
        return self._each(Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> "TextIds":
        return TextIds(
            change(self.ids_BL),
            change(self.mask_BL),
            None if self.pooled is None else self.pooled._each(change),
            None if self.dropped_B is None else change(self.dropped_B),
        )


Condition = Tensor | Text
"""Conditions of B rows: class labels (int64, `num_classes` for none), or texts (the empty prompt's for none)."""


def with_null(text: Text, drop_B: Tensor, null: Text) -> Text:
    """The texts, the null one (one row) where they are dropped."""
    pooled_BP = None
    if text.pooled_BP is not None and null.pooled_BP is not None:
        pooled_BP = torch.where(drop_B[:, None], null.pooled_BP, text.pooled_BP)
    tokens_BLE = torch.where(drop_B[:, None, None], null.tokens_BLE, text.tokens_BLE)
    return Text(tokens_BLE, torch.where(drop_B[:, None], null.mask_BL, text.mask_BL), pooled_BP)


def join(conditions: Sequence[Condition]) -> Condition:
    """The rows of all conditions, in order; all of one kind."""
    texts = [condition for condition in conditions if isinstance(condition, Text)]
    if not texts:
        return torch.cat([condition for condition in conditions if isinstance(condition, Tensor)])
    assert len(texts) == len(conditions)
    pooled = [text.pooled_BP for text in texts if text.pooled_BP is not None]
    assert len(pooled) in (0, len(texts))
    return Text(
        torch.cat([text.tokens_BLE for text in texts]),
        torch.cat([text.mask_BL for text in texts]),
        torch.cat(pooled) if pooled else None,
    )
