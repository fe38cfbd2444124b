"""Pictures from installed packages as sources, without a network: `domains`, `patches` of photographs, `emoji`."""

import hashlib
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from dataclasses import dataclass

from ddm_ray.data.images import png
from ddm_ray.data.sources import packaged_kinds
from ddm_ray.data.sources.chunks import Encoded, EncodedChunk, Listing, Unit, chunked, rows_of_a_part
from ddm_ray.data.sources.conditions import Conditioned
from ddm_ray.data.sources.packaged_kinds import CROP_SIDE, KINDS, PHOTOGRAPHS, SIDE, Drawing

EMOJI = "emoji"
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
class PictureSet:
    """Kinds of pictures by name, in the order of their labels, the packages that ship them, and their side in pixels.

    `most`: as many of a kind, at most, unless one asks for another number.
    """

    name: str
    kinds: dict[str, Callable[[], Iterator[Drawing]]]
    packages: Collection[str]
    side: int
    most: int


DOMAINS = PictureSet("domains", KINDS, packaged_kinds.DOMAINS_PACKAGES, SIDE, 2000)
PATCHES = PictureSet("patches", PHOTOGRAPHS, packaged_kinds.PHOTOGRAPHS_PACKAGES, CROP_SIDE, 1000)


@dataclass(frozen=True)
class PicturesOfKinds(Conditioned):
    """Distinct pictures of each kind of a set, no more than `most` of each, RGB as PNG files; label = kind. See Source.

    Which ones depends on their pixels alone. Those of a scene (frames of a sprite, neighbouring tiles) are held out
    together.
    """

    pictures: PictureSet
    most: int

    def list(self) -> Listing:
        """A unit a kind. Raises DataError if a package isn't installed."""
        for package in self.pictures.packages:
            packaged_kinds.folder_of(package)
        kinds = self.pictures.kinds
        units = tuple(Unit(kind, self.most * self.pictures.side**2 * 3) for kind in kinds)
        return Listing(units, tuple(kinds), chunk_rows=rows_of_a_part(self.most * len(kinds)))

    def read(self, unit: Unit, skip: Container[int] = ()) -> Iterator[EncodedChunk]:
        """See Source."""
        kind, own = unit.key, f"{self.pictures.name}/{unit.key}"
        rows = [
            _encoded(
                self,
                f"{own}/{name}",
                drawing,
                kind,
                f"{kind}: {drawing.shows}" if drawing.shows else kind,
                f"{kind}/{drawing.scene}",
            )
            for name, drawing in _distinct(self.pictures.kinds[kind](), self.most)
        ]
        return chunked(_shared(rows), self.chunk_rows, skip)


@dataclass(frozen=True)
class Emoji(Conditioned):
    """Emoji in nine groups, without variants by tone of skin, 32x32 RGB as PNG files; label = group. See Source."""

    def list(self) -> Listing:
        """One unit. Raises DataError if a package isn't installed."""
        for package in packaged_kinds.EMOJI_PACKAGES:
            packaged_kinds.folder_of(package)
        return Listing((Unit(EMOJI, 1898 * SIDE * SIDE * 3),), EMOJI_GROUPS, chunk_rows=rows_of_a_part(1898))

    def read(self, unit: Unit, skip: Container[int] = ()) -> Iterator[EncodedChunk]:
        """See Source."""
        rows = [
            _encoded(self, f"{EMOJI}/{name}", drawing, drawing.group, drawing.shows, drawing.scene)
            for name, drawing in _distinct(packaged_kinds.emoji(tones=False))
        ]
        return chunked(_shared(rows), self.chunk_rows, skip)


def _distinct(drawings: Iterable[Drawing], most: int | None = None) -> list[tuple[str, Drawing]]:
    """Drawings of different pixels by a hash of these, in its order, which is a random one; the first `most`."""
    by_hash = {hashlib.sha256(drawing.pixels_HWC.tobytes()).hexdigest()[:16]: drawing for drawing in drawings}
    return sorted(by_hash.items(), key=lambda item: item[0])[:most]


def _shared(rows: list[Encoded]) -> Iterator[tuple[Encoded, float]]:
    """Rows, each with the share of them that ends with it."""
    return ((row, place / len(rows)) for place, row in enumerate(rows, 1))


def _encoded(source: Conditioned, row_id: str, drawing: Drawing, name: str, caption: str, scene: str) -> Encoded:
    conditions = source.conditions
    try:
        condition = conditions.of(caption if conditions.captions else name)
    except ValueError as problem:
        return Encoded(row_id, None, None, str(problem))
    return Encoded(row_id, png(drawing.pixels_HWC, compression=1), condition, scene=scene)
