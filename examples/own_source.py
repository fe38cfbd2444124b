"""Write a source of your own: images that a word names, for `ddm init` and `ddm prepare`.

You learn what a source is, and how ddm-ray finds it. Write a source if your images are neither in a folder nor in
WebDataset tars or parquet files: because you draw them, as here, or because they are in a format of your own.

    python examples/own_source.py    # writes waves.png, the first images of the source; a second or two

A source belongs to an installed package, so that it is found on each machine that reads the images. The package says in
its pyproject.toml which words name its sources. Here that package is this folder:

    pip install ./examples
    ddm init runs/waves --recipe tiny --set data.source=waves:900 --set data.image_size=16 --set data.num_classes=3
    ddm prepare runs/waves
    ddm partition runs/waves
    ddm train runs/waves all
    ddm sample runs/waves -o waves.png
"""

import argparse
from collections.abc import Container, Iterator
from dataclasses import dataclass

import numpy as np

from ddm_ray.core.streams import stream
from ddm_ray.data.sources.chunks import Encoded, EncodedChunk, Listing, Unit, chunked
from ddm_ray.data.sources.named import NamedSource

SIDE = 16
CLASSES = ("across", "upright", "round")


def draw(index: int) -> tuple[np.ndarray, str]:
    """Pixels (H, W) and class of one image. They depend on its number alone, so that each machine draws the same."""
    generator = stream(0, index)
    shape = CLASSES[index % len(CLASSES)]
    y_HW, x_HW = np.mgrid[:SIDE, :SIDE] - generator.uniform(0, SIDE, (2, 1, 1))
    distance_HW = {"across": y_HW, "upright": x_HW, "round": np.hypot(x_HW, y_HW)}[shape]
    length = generator.uniform(4, 8)
    return np.rint(127.5 + 120 * np.cos(2 * np.pi * distance_HW / length)).astype(np.uint8), shape


@dataclass(frozen=True)
class Waves(NamedSource):
    """`count` grey pictures of waves."""

    forms = ("waves", "waves:NUMBER")  # how data.source is written
    about = "NUMBER pictures of waves of three shapes, 16 x 16, grey"  # a line in `ddm fields`

    count: int = 900

    def list(self) -> Listing:
        """Say what there is. A unit is work for one task: a large source has many, of which several run at once."""
        return Listing((Unit("all", bytes=self.count * SIDE * SIDE),), classes=CLASSES, rows=self.count)

    def read(self, unit: Unit, skip: Container[int] = ()) -> Iterator[EncodedChunk]:
        """Yield the rows of a unit in chunks. Chunks in `skip` exist already, from before a kill."""
        rows = ((self.row(index), (index + 1) / self.count) for index in range(self.count))
        return chunked(rows, self.chunk_rows, skip)

    def row(self, index: int) -> Encoded:
        """An image as a file in memory, with a name that no other row has, and its class."""
        pixels_HW, shape = draw(index)
        return self.encoded(f"waves/{index:06d}", pixels_HW, shape)


if __name__ == "__main__":
    import io
    from importlib.metadata import entry_points

    from PIL import Image

    from ddm_ray.config import DataConfig
    from ddm_ray.data.sources.conditions import Conditions

    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="waves.png")
    args = parser.parse_args()

    # Read the source as `ddm prepare` does: list its units, then read each of them.
    config = DataConfig(num_classes=len(CLASSES), image_size=SIDE)
    source = Waves(Conditions(config, classes=CLASSES), chunk_rows=32, count=64)
    rows = [row for unit in source.list().units for chunk in source.read(unit) for row in chunk.rows]
    picture = Image.new("L", (8 * (SIDE + 2), 8 * (SIDE + 2)), 255)
    for number, row in enumerate(rows):
        image = Image.open(io.BytesIO(row.image or b""))
        picture.paste(image, (number % 8 * (SIDE + 2), number // 8 * (SIDE + 2)))
    picture.resize((4 * picture.width, 4 * picture.height), Image.Resampling.NEAREST).save(args.out)
    print(f"{args.out}: {len(rows)} images of {', '.join(CLASSES)}")

    known = "waves" in entry_points(group="ddm_ray.sources").names
    print("ddm finds the source" if known else "ddm finds the source after: pip install ./examples")
