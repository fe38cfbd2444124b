"""Makes decoded chunks into parts of the rows. Without Ray."""

import json
from dataclasses import dataclass

from ddm_ray.data.prepare.embed import Embed
from ddm_ray.data.prepare.fit_embedder import embeds_pixels, fitted
from ddm_ray.data.prepare.records import EmbeddedRows, RowsRecord, RowsStore, store_rows
from ddm_ray.run.chunk_records import ChunkKey
from ddm_ray.store.checksummed import canonical

NULL = "_null_text/NULL_TEXT.json"
"""JSON object that names the file of the encoded empty prompt, in runs conditioned on texts."""


NETWORKS = "_networks/NETWORKS.json"
"""JSON object that names the file of fingerprints of the networks that make the rows."""


def networks_of(chunks: RowsStore) -> dict[str, str]:
    """Fingerprints, by role, of the networks that make a run's rows, except one that the run itself has fitted.

    Raises CorruptArtifact if they are missing or altered.
    """
    data, given = chunks.run.config.data, chunks.run.config.partition.given
    others = data.latents or data.text or not (given or embeds_pixels(chunks.run.config))
    return _stored(chunks) if others else {}


def _stored(chunks: RowsStore) -> dict[str, str]:
    networks: dict[str, str] = json.loads(chunks.read_once(NETWORKS)[0])
    return networks


@dataclass(frozen=True)
class MakeRows:
    """The `ChunkMaker` of rows: networks on `device` embed and encode decoded images."""

    chunks: RowsStore
    device: str

    def load(self) -> Embed:
        """Load the networks. The first process to do so stores their fingerprints and the empty prompt's text.

        Raises DriftError if another process has made rows with other networks, and as Embed.
        """
        embed = Embed(self.chunks.run.config, fitted(self.chunks), self.device)
        if own := embed.fingerprints():
            # Imports torch, which rows of pixels don't need.
            from ddm_ray.models.fingerprints import require_same_network

            self.chunks.write_once(NETWORKS, ".json", lambda: (canonical(own), {}))
            known = _stored(self.chunks)
            for part, fingerprint in own.items():
                require_same_network(part, fingerprint, known.get(part, fingerprint))
        if (text := embed.null_text()) is not None:
            self.chunks.write_once(NULL, ".safetensors", lambda: (text, {}))
        return embed

    def store(self, key: ChunkKey, rows: EmbeddedRows) -> RowsRecord:
        """See ChunkMaker."""
        return store_rows(self.chunks, key, rows)
