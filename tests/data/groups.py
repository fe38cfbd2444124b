"""Rows whose groups are known: embeddings about a few centres, images of a shade of their own."""

import hashlib
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from ddm_ray.config import RunConfig, load_recipe
from ddm_ray.data.order import holdout_fractions
from ddm_ray.data.schema import EMBEDDING, HELDOUT, TRAIN, column, rows_schema
from ddm_ray.run.graph import ROWS, Artifact
from ddm_ray.run.run import Run
from tests.data.rows import commit_tables

FOUR = ("partition.num_clusters=4", "partition.num_fine=32")


@dataclass(frozen=True)
class Rows:
    """N rows: group_N in 0..G-1, embeddings_ND, pixels_NCHW uint8; labels are the groups, modulo the classes."""

    ids: list[str]
    group_N: np.ndarray
    embeddings_ND: np.ndarray
    pixels_NCHW: np.ndarray

    def table(self, config: RunConfig, embedding: bool = True) -> pa.Table:
        """By `rows_schema`."""
        held_N = holdout_fractions(self.ids) < config.data.heldout
        columns = {
            "id": self.ids,
            "data": column(self.pixels_NCHW, np.dtype("u1")),
            "label": self.group_N % len(config.data.class_names),
            "content_hash": [hashlib.sha256(row_id.encode()).hexdigest() for row_id in self.ids],
            "split": [HELDOUT if held else TRAIN for held in held_N],
            "embedding": column(self.embeddings_ND, EMBEDDING),
        }
        schema = rows_schema(config.data, self.embeddings_ND.shape[1] if embedding else 0)
        return pa.table([columns[name] for name in schema.names], schema=schema)

    def take(self, order: np.ndarray) -> "Rows":
        ids = [self.ids[row] for row in order]
        return Rows(ids, self.group_N[order], self.embeddings_ND[order], self.pixels_NCHW[order])


def rows(shares: tuple[float, ...] = (0.4, 0.3, 0.2, 0.1), num_rows: int = 1500, dim: int = 6, seed: int = 0) -> Rows:
    """Groups of so unequal shares, well apart."""
    generator = np.random.default_rng(seed)
    group_N = generator.choice(len(shares), num_rows, p=shares)
    centre_GD = 10 * generator.standard_normal((len(shares), dim))
    embeddings_ND = (centre_GD[group_N] + generator.standard_normal((num_rows, dim))).astype(np.float32)
    shade_N = 200 * group_N / len(shares) + 10
    pixels_NCHW = (shade_N[:, None, None, None] + generator.integers(0, 20, (num_rows, 1, 8, 8))).astype(np.uint8)
    return Rows([f"{seed}/{row:06d}" for row in range(num_rows)], group_N, embeddings_ND, pixels_NCHW)


def run_of(path: str, truth: Rows, *settings: str, part_rows: int = 400, artifact: Artifact = ROWS) -> Run:
    """A run of recipe tiny with such rows, in parts of `part_rows`."""
    run = Run.create(path, load_recipe("tiny", settings))
    table = truth.table(run.config, run.config.partition.method != "given")
    commit_tables(run, [table.slice(start, part_rows) for start in range(0, table.num_rows, part_rows)], artifact)
    return run
