"""Rows of a run made in this process, for what comes after `prepare`."""

import pyarrow as pa

from ddm_ray.config import load_recipe
from ddm_ray.data.prepare import Embed, decode_batch
from ddm_ray.data.schema import TRAIN, images, to_parquet
from ddm_ray.data.sources import digits
from ddm_ray.models.features import PixelFeatures
from ddm_ray.storage.run import ROWS, Run


def commit_rows(path: str, table: pa.Table | None = None, settings: tuple[str, ...] = (), parts: int = 3) -> Run:
    """A run of recipe tiny whose `rows` are a source table's, in `parts` files in the table's order."""
    run = Run.create(str(path), load_recipe("tiny", settings))
    decoded = decode_batch(digits() if table is None else table, run.config.data, run.url)
    train = decoded.filter(pa.compute.field("split") == TRAIN).sort_by("id")
    features = PixelFeatures.fit(images(train, run.config.data.shape), run.config.embedder.dim)
    rows = Embed(run.config, features)(decoded)
    size = -(-rows.num_rows // parts)
    names = [f"part-{part}.parquet" for part in range(parts)]
    for part, name in enumerate(names):
        run.store.write(f"{ROWS}/{name}", to_parquet(rows.slice(part * size, size)))
    run.commit(ROWS, names, {"rows": rows.num_rows})
    return run


def flip_byte(run: Run, key: str) -> None:
    """Alter one byte in the middle of an object."""
    content = bytearray(run.store.read(key))
    content[len(content) // 2] ^= 1
    run.store.write(key, bytes(content))
