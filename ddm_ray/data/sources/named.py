"""Sources that a word names, without files: generated here, or shipped with an installed package."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from ddm_ray.data.images import png
from ddm_ray.data.sources.chunks import Encoded, Source
from ddm_ray.data.sources.conditions import Conditions
from ddm_ray.data.sources.registry import MOVED, MOVED_TO, SOURCES
from ddm_ray.errors import DataError


@dataclass(frozen=True)
class NamedSource(Source):
    """Base class of sources that a word names; see Source. Each has a line in `SOURCES`, or is an entry point.

    `forms`: the possible values of `data.source`, `stripes`, `stripes:NUMBER` or both; the number is the third argument
    of the constructor. `about`: a line of help. `credit`: the pictures' authors and licence, which is stored with the
    rows, to be shown with the pictures and with samples learnt from them.
    """

    forms: ClassVar[tuple[str, ...]]
    about: ClassVar[str]
    credit: ClassVar[str | None] = None

    @classmethod
    def of(cls, source: str, conditions: Conditions, chunk_rows: int) -> Self:
        """The configured source. Raises DataError for a number that it doesn't take, or lacks."""
        word, colon, written = source.partition(":")
        numbered = next((form for form in cls.forms if ":" in form), None)
        if not colon and word in cls.forms:
            return cls(conditions, chunk_rows)
        if numbered is None:
            raise DataError(f"data.source {source!r:.200}: {word} takes no number; a folder of that name is ./{source}")
        count = written.replace("_", "")
        if not count.isdecimal() or int(count) < 1:
            raise DataError(f"data.source {source!r:.200}: {numbered} has a number from 1 up")
        make: Callable[..., Self] = cls
        return make(conditions, chunk_rows, int(count))

    def encoded(self, row_id: str, pixels: np.ndarray, stated: int | str, scene: str | None = None) -> Encoded:
        """A row of pixels, encoded as a PNG file, with its label, class name or caption."""
        try:
            condition = self.conditions.of(stated)
        except ValueError as problem:
            return Encoded(row_id, None, None, str(problem))
        return Encoded(row_id, png(pixels, compression=1), condition, scene=scene)


def named_source(source: str) -> type[NamedSource] | None:
    """The class of a configured source that a word names; None for a file, folder or URI. Raises DataError."""
    word, _, rest = source.partition(":")
    # Most sources are paths and URIs. They are recognised without looking up installed packages.
    if rest.startswith("//") or "/" in word or not word:
        return None
    if word in SOURCES:
        return SOURCES[word]
    if word in MOVED:
        raise DataError(f"data.source {source!r:.200} {MOVED_TO}; a folder of that name is ./{word}")
    return None
