"""A run of real images in a folder, as if trained, and the bytes of all that lies in it."""

from hashlib import sha256
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

from ddm_ray.config import load_recipe
from ddm_ray.data.images import png
from ddm_ray.data.partition.stage import partition
from ddm_ray.data.prepare.stage import prepare
from ddm_ray.data.sharded.serial import serial
from ddm_ray.run.info import ClusterFit
from ddm_ray.run.run import Run
from ddm_ray.store.store import Store
from tests.random_run import publish_models


def write_digits(folder: Path, numbers: range, inverted: bool = False) -> list[str]:
    """Write these of the real digits, each in its class's folder; their ids."""
    digits, ids = load_digits(), []
    for number in numbers:
        ids.append(f"{digits.target[number]}/{number:04d}.png")
        path = folder / ids[-1]
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = (digits.images[number] * 15.9).astype(np.uint8)
        path.write_bytes(png(255 - pixels if inverted else pixels))
    return ids


def make_base(folder: Path, *settings: str, trained: bool = True, num_rows: int = 200) -> Run:
    """A partitioned run of recipe tiny in `folder`/run, of that many digits in `folder`/photos."""
    write_digits(folder / "photos", range(num_rows))
    run = Run.create(str(folder / "run"), load_recipe("tiny", (f"data.source={folder / 'photos'}", *settings)))
    make_data(run)
    if trained:
        publish_models(run)
    return run


def assert_fits(seen: ClusterFit, new_N: np.ndarray, old_N: np.ndarray) -> None:
    """The figures of a cluster are numpy's of its rows' distances, which a sample has all of."""
    assert (seen.rows, seen.far) == (len(new_N), int((new_N > np.percentile(old_N, 99)).sum()))


def make_data(run: Run) -> None:
    """Rows, partition and report of a run, in this process."""
    prepare(run, execute=serial)
    partition(run)


def sums(run: Run) -> dict[str, str]:
    """Checksums of everything in a run, but for notes of runs that were derived from it, by key."""
    keys = [key for key in Store(run.url).sizes("") if not key.startswith("derived/")]
    return {key: sha256((Path(run.url) / key).read_bytes()).hexdigest() for key in keys}
