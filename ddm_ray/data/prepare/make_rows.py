"""Decoded chunks made into parts of the rows. No Ray."""

from dataclasses import dataclass

from ddm_ray.data.prepare.embed import Embed
from ddm_ray.data.prepare.fit_embedder import fitted
from ddm_ray.data.prepare.records import EmbeddedRows, RowsRecord, RowsStore, store_rows
from ddm_ray.storage.chunk_records import ChunkKey

NULL = "_null_text/NULL_TEXT.json"
"""Names the encoded empty prompt, of runs conditioned on texts."""


@dataclass(frozen=True)
class MakeRows:
    """The `ChunkMaker` of rows: networks on `device` embed and encode decoded images."""

    chunks: RowsStore
    device: str

    def load(self) -> Embed:
        """Load the networks; the first process to do so stores the empty prompt's text."""
        embed = Embed(self.chunks.run.config, fitted(self.chunks), self.device)
        if (text := embed.null_text()) is not None:
            self.chunks.write_once(NULL, ".safetensors", lambda: (text, {}))
        return embed

    def store(self, key: ChunkKey, rows: EmbeddedRows) -> RowsRecord:
        """See ChunkMaker."""
        return store_rows(self.chunks, key, rows)
