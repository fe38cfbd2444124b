"""Passes over all rows: what is made of each part, in turn by this process or side by side by others."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol, TypeVar

import pyarrow as pa

from ddm_ray.data import OnProgress

if TYPE_CHECKING:
    from ddm_ray.data.partition.clustering import RowsReader

T = TypeVar("T")


class EachPart(Protocol):
    """Makes something of each part's rows."""

    def __call__(
        self, rows: "RowsReader", make: Callable[[pa.Table], T], columns: list[str] | None, on_progress: OnProgress
    ) -> Iterator[T]:
        """Call `make`, which can be pickled, on each part, in any order; `columns`: as of `RowsReader.parts`."""
        ...


def in_turn(
    rows: "RowsReader", make: Callable[[pa.Table], T], columns: list[str] | None, on_progress: OnProgress
) -> Iterator[T]:
    """`EachPart` by this process alone, in the order of the parts."""
    return map(make, rows.parts(columns, on_progress))
