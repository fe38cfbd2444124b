"""Pictures that packages ship as sources, without a network: `domains`, `patches` of photographs, `emoji`."""

import hashlib
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from ddm_ray.data.sources.chunks import Encoded, EncodedChunk, Listing, Unit, chunked, rows_of_a_part
from ddm_ray.data.sources.named import NamedSource
from ddm_ray_study import pictures
from ddm_ray_study.pictures import CROP_SIDE, KINDS, PHOTOGRAPHS, SIDE, Drawing

TWEMOJI = "Emoji: Twemoji, by Twitter, Inc and other contributors, CC BY 4.0."
EMOJI_GROUPS = (
    "Activities",
    "Animals & Nature",
    "Flags",
    "Food & Drink",
    "Objects",
    "People & Body",
    "Smileys & Emotion",
    "Symbols",
    "Travel & Places",
)


@dataclass(frozen=True)
class PicturesOfKinds(NamedSource):
    """Distinct pictures of each kind of a set, no more than `most` of each, RGB as PNG files; label = kind. See Source.

    Which ones depends on their pixels alone. Those of a scene (frames of a sprite, neighbouring tiles) are held out
    together. `kinds` are in the order of their labels, from these `packages`, and `side` pixels wide and high.
    """

    kinds: ClassVar[dict[str, Callable[[], Iterator[Drawing]]]]
    packages: ClassVar[Collection[str]]
    side: ClassVar[int]

    most: int

    def list(self) -> Listing:
        """A unit a kind. Raises DataError if a package isn't installed."""
        pictures.require(self.packages)
        units = tuple(Unit(kind, self.most * self.side**2 * 3) for kind in self.kinds)
        return Listing(units, tuple(self.kinds), chunk_rows=rows_of_a_part(self.most * len(self.kinds)))

    def read(self, unit: Unit, skip: Container[int] = ()) -> Iterator[EncodedChunk]:
        """See Source."""
        kind, rows = unit.key, []
        for name, drawing in _distinct(self.kinds[kind](), self.most):
            caption = f"{kind}: {drawing.shows}" if drawing.shows else kind
            stated = caption if self.conditions.captions else kind
            row_id = f"{self.forms[0]}/{kind}/{name}"
            rows.append(self.encoded(row_id, drawing.pixels_HWC, stated, f"{kind}/{drawing.scene}"))
        return chunked(_shared(rows), self.chunk_rows, skip)


@dataclass(frozen=True)
class Domains(PicturesOfKinds):
    """Seven kinds of found pictures; see PicturesOfKinds."""

    forms = ("domains", "domains:NUMBER")
    about = "pictures of seven kinds (emoji, icons, sprites, maps), 32 x 32, in colour; NUMBER: of a kind, at most"
    credit = (
        f"{TWEMOJI} Icons: Crystal, LGPL. Sprites and textures: Freedoom, BSD-3. Maps: NASA's Blue Marble, NOAA's"
        " ETOPO1, Natural Earth."
    )
    kinds, packages, side = KINDS, pictures.DOMAINS_PACKAGES, SIDE

    most: int = 2000


@dataclass(frozen=True)
class Patches(PicturesOfKinds):
    """Crops of sixteen photographs; see PicturesOfKinds."""

    forms = ("patches", "patches:NUMBER")
    about = "crops of sixteen photographs, 8 x 8, in colour; NUMBER: of each, at most"
    credit = (
        "Photographs, cropped: China by danielbuechele and flower by vultilion, CC BY 2.0"
        " (creativecommons.org/licenses/by/2.0), of scikit-learn; others of scikit-image, a motorcycle of Middlebury's."
    )
    kinds, packages, side = PHOTOGRAPHS, pictures.PHOTOGRAPHS_PACKAGES, CROP_SIDE

    most: int = 1000


@dataclass(frozen=True)
class Emoji(NamedSource):
    """Emoji in nine groups, without variants by tone of skin, 32x32 RGB as PNG files; label = group. See Source."""

    forms = ("emoji",)
    about = "1,865 emoji in nine groups, 32 x 32, in colour"
    credit = TWEMOJI

    def list(self) -> Listing:
        """One unit. Raises DataError if a package isn't installed."""
        pictures.require(pictures.EMOJI_PACKAGES)
        return Listing((Unit("emoji", 1898 * SIDE * SIDE * 3),), EMOJI_GROUPS, chunk_rows=rows_of_a_part(1898))

    def read(self, unit: Unit, skip: Container[int] = ()) -> Iterator[EncodedChunk]:
        """See Source."""
        rows = []
        for name, drawing in _distinct(pictures.emoji(tones=False)):
            stated = drawing.shows if self.conditions.captions else drawing.group
            rows.append(self.encoded(f"emoji/{name}", drawing.pixels_HWC, stated, drawing.scene))
        return chunked(_shared(rows), self.chunk_rows, skip)


def _distinct(drawings: Iterable[Drawing], most: int | None = None) -> list[tuple[str, Drawing]]:
    """Drawings of different pixels by a hash of these, in its order, which is a random one; the first `most`."""
    by_hash = {hashlib.sha256(drawing.pixels_HWC.tobytes()).hexdigest()[:16]: drawing for drawing in drawings}
    return sorted(by_hash.items(), key=lambda item: item[0])[:most]


def _shared(rows: list[Encoded]) -> Iterator[tuple[Encoded, float]]:
    """Rows, each with the share of them that ends with it."""
    return ((row, place / len(rows)) for place, row in enumerate(rows, 1))
