"""The records of rows being made: which chunks of which units are done, told by the names of their files alone."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

from ddm_ray.errors import CorruptArtifact
from ddm_ray.storage.manifest import canonical, sha256
from ddm_ray.storage.store import Store

PLAN = "_plan/PLAN.json"
RECORDS = "_parts"
_NAME = re.compile(r"(\d{6,})-(\d{6,})(-last)?\.json")


@dataclass(frozen=True, order=True)
class Place:
    """A chunk's place in the source: the number of its unit, its own within that, and whether it is the last there."""

    unit: int
    chunk: int
    last: bool

    @property
    def stem(self) -> str:
        """What names of its files have in common; their order is the source's."""
        return f"{self.unit:06d}-{self.chunk:06d}"

    @property
    def name(self) -> str:
        """Of its record."""
        return f"{self.stem}{'-last' if self.last else ''}.json"

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """The place whose record has this name, if one has."""
        found = _NAME.fullmatch(name)
        return cls(int(found[1]), int(found[2]), found[3] is not None) if found else None


def places_done(store: Store, artifact: str) -> list[Place]:
    """The places of all chunks that have a record, in the source's order."""
    return sorted(place for name in store.sizes(f"{artifact}/{RECORDS}") if (place := Place.parse(name)))


def chunks_done(places: Iterable[Place]) -> tuple[dict[int, set[int]], set[int]]:
    """Recorded chunks by unit, and the units of which every chunk is recorded."""
    chunks: dict[int, set[int]] = {}
    lengths: dict[int, int] = {}
    for place in places:
        chunks.setdefault(place.unit, set()).add(place.chunk)
        if place.last:
            lengths[place.unit] = place.chunk + 1
    return chunks, {unit for unit, length in lengths.items() if len(chunks[unit]) == length}


def rows_progress(store: Store, artifact: str) -> dict[str, int] | None:
    """How far rows are that have been begun: `units` in all, `units_done`, `parts` recorded. None: not begun.

    Raises CorruptArtifact for a damaged plan.
    """
    try:
        plan = unseal(store.read(f"{artifact}/{PLAN}"), f"{store.url}/{artifact}/{PLAN}", ["units"])
    except FileNotFoundError:
        return None
    places = places_done(store, artifact)
    return {"units": plan["units"], "units_done": len(chunks_done(places)[1]), "parts": len(places)}


def seal(body: dict[str, Any]) -> bytes:
    """A JSON object with a checksum over itself."""
    return canonical({**body, "checksum": sha256(canonical(body))}) + b"\n"


def unseal(data: bytes, where: str, fields: Iterable[str] = ()) -> dict[str, Any]:
    """What `seal` sealed, without the checksum. Raises CorruptArtifact naming `where` if it was altered, or lacks
    `fields`, being something else's.
    """
    try:
        body: dict[str, Any] = json.loads(data)
        checksum = body.pop("checksum")
    except (ValueError, KeyError, AttributeError, TypeError):
        raise CorruptArtifact(f"{where}: not whole") from None
    if checksum != sha256(canonical(body)):
        raise CorruptArtifact(f"{where}: altered since it was written")
    if not body.keys() >= set(fields):
        raise CorruptArtifact(f"{where}: is the record of something else")
    return body
