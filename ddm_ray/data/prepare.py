"""The stage `prepare`: source -> decoded rows -> embeddings -> the artifact `rows`, through Ray Data."""

import hashlib
import io
import json
import struct
import uuid
import zlib
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import ray.data
from PIL import Image, UnidentifiedImageError
from ray.data.datasource import FilenameProvider

from ddm_ray.config import DataConfig, RunConfig
from ddm_ray.data import Progress
from ddm_ray.data.schema import HELDOUT, TRAIN, decoded_schema, images, matrix, rows_schema, vectors
from ddm_ray.data.sources import open_source
from ddm_ray.errors import DataError
from ddm_ray.models.features import Features, PixelFeatures, TimmFeatures
from ddm_ray.storage.manifest import Manifest, canonical, sha256
from ddm_ray.storage.run import ROWS, Run
from ddm_ray.storage.store import Store

MODES = {1: "L", 3: "RGB"}
PCA_ROWS = 10_000
REJECTED = f"{ROWS}/_rejected"
DECODER_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)


def prepare(run: Run, progress: Progress | None = None) -> Manifest:
    """Make the artifact `rows` of the run's source; a no-op if it is finished. Ray must be initialised.

    Raises DataError if no row can be used, an id comes twice or the embedder doesn't fit; DriftError.
    """
    return run.finished(ROWS) or prepare_source(run, open_source(run.config.data), progress)


def prepare_source(run: Run, source: ray.data.Dataset, progress: Progress | None = None) -> Manifest:
    """As `prepare`, of a source with the columns of `schema.SOURCE`.

    Others may be preparing the same run: each counts its own files alone, the first to commit wins, and whoever
    comes to its end deletes all files but the winner's.
    """
    tell = progress or (lambda fraction, note: None)
    source.context.enable_progress_bars = False
    source.context.print_on_execution_start = False
    config = run.config
    if config.data.channels not in MODES:
        raise DataError(f"data.channels is {config.data.channels}; images are grey (1) or RGB (3)")
    if config.data.num_classes is None or config.data.latents is not None:
        raise DataError("data.text and data.latents: only pixels with class labels can be prepared so far")
    tell(0.0, "decoding")
    decoded = source.map_batches(
        partial(decode_batch, config=config.data, rejected_url=run.url),
        batch_format="pyarrow",
        batch_size=config.embedder.batch_size,
    )
    if config.embedder.kind == "pixels":
        decoded = decoded.materialize()  # read twice: to fit the components, and to apply them
    pixel_features = _embedder(run, decoded)
    tell(0.4, "embedding")
    embedded = decoded.map_batches(
        Embed,
        fn_constructor_kwargs={"config": config, "pixel_features": pixel_features},
        batch_format="pyarrow",
        batch_size=config.embedder.batch_size,
        # A pool of fixed size can hang on an errored block (ray#62746).
        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=2),
        num_cpus=0.5,
    )
    own = f"part-{uuid.uuid4().hex[:8]}"
    filesystem, path = run.store.filesystem(ROWS)
    embedded.write_parquet(path, filesystem=filesystem, filename_provider=FilenameProvider(own, file_format="parquet"))
    tell(0.9, "checking")
    names = [name for name in run.store.sizes(ROWS) if name.startswith(own)]
    manifest = run.finished(ROWS) or _commit(run, names)
    for name in run.store.sizes(ROWS):
        if name.startswith("part-") and name not in manifest.files:
            run.store.delete_one(f"{ROWS}/{name}")
    tell(1.0, f"{manifest.info['rows']} rows, {manifest.info['rejected']} rejected")
    return manifest


def decode_batch(batch: pa.Table, config: DataConfig, rejected_url: str) -> pa.Table:
    """Encoded images -> `decoded_schema`; rows that can't be used go to `rows/_rejected/` with reasons."""
    rows: list[dict[str, Any]] = []
    rejected: list[dict[str, str]] = []
    pixels: list[np.ndarray] = []
    num_classes = config.num_classes or 0
    for row in batch.to_pylist():
        try:
            image_CHW = decode(row["image"], config)
            if row["label"] not in range(num_classes):
                raise ValueError(f"label {row['label']} is not in 0..{num_classes - 1}")
        except DECODER_ERRORS as error:
            rejected.append({"id": row["id"], "reason": _reason(error)})
            continue
        split = HELDOUT if place(row["id"]) < config.heldout else TRAIN
        rows.append({**row, "content_hash": sha256(row["image"]), "split": split})
        pixels.append(image_CHW)
    if rejected:
        # Named by its content, so that a task run again replaces what it wrote before.
        content = json.dumps(rejected, indent=1).encode()
        Store(rejected_url).write(f"{REJECTED}/{sha256(content)[:16]}.json", content)
    schema = decoded_schema(config.shape)
    data = vectors(np.stack(pixels)) if pixels else pa.array([], schema.field("data").type)
    columns = {name: [row[name] for row in rows] for name in ("id", "content_hash", "label", "split")}
    return pa.table({**columns, "data": data}).select(schema.names).cast(schema)


def decode(encoded: bytes | None, config: DataConfig) -> np.ndarray:
    """image_CHW float32 in [-1, 1], resized bicubically to `config`'s shape. Raises one of DECODER_ERRORS."""
    if not encoded:
        raise ValueError("no image")
    size = (config.image_size, config.image_size)
    with Image.open(io.BytesIO(encoded)) as opened:
        image = opened.convert(MODES[config.channels])
    if image.size != size:
        image = image.resize(size, Image.Resampling.BICUBIC)
    pixels_HWC = np.asarray(image, np.float32).reshape(*size, config.channels)
    return pixels_HWC.transpose(2, 0, 1) / 127.5 - 1


def place(row_id: str) -> float:
    """A row's place in [0, 1), which depends on its id alone; the lowest places are held out."""
    return int.from_bytes(hashlib.sha256(row_id.encode()).digest()[:6]) / 2**48


class Embed:
    """Adds the column `embedding`; one per actor of the pool, so that a network is loaded once."""

    def __init__(self, config: RunConfig, pixel_features: PixelFeatures | None):
        self.shape = config.data.shape
        self.features: Features = pixel_features or TimmFeatures(config.embedder)

    def __call__(self, batch: pa.Table) -> pa.Table:
        """`decoded_schema` -> `rows_schema`."""
        schema = rows_schema(self.shape, self.features.dim)
        if not batch.num_rows:
            return schema.empty_table()
        return batch.append_column(schema.field("embedding"), vectors(self.features(images(batch, self.shape))))


def _embedder(run: Run, decoded: ray.data.Dataset) -> PixelFeatures | None:
    config = run.config
    if config.embedder.kind == "timm":
        TimmFeatures(config.embedder)  # what can't be loaded says so here, in one line
        return None
    sample = _sample(decoded, PCA_ROWS)
    if not sample.num_rows:
        raise _no_rows(run)
    return PixelFeatures.fit(images(sample, config.data.shape), config.embedder.dim)


def _sample(decoded: ray.data.Dataset, most: int) -> pa.Table:
    """The same training rows in whatever order Ray yields them: those of the lowest places, sorted by id."""
    tables: list[pa.Table] = []
    for batch in decoded.iter_batches(batch_format="pyarrow", batch_size=most):
        assert isinstance(batch, pa.Table)
        tables = [_lowest(pa.concat_tables([*tables, batch.filter(pc.field("split") == TRAIN)]), most)]
    return tables[0].sort_by("id") if tables else pa.table({})


def _lowest(table: pa.Table, most: int) -> pa.Table:
    places = [place(row_id) for row_id in table["id"].to_pylist()]
    return table.take(np.argsort(places, kind="stable")[:most].astype(np.int64))


def _commit(run: Run, names: list[str]) -> Manifest:
    survey = _survey(run, names)
    if survey.info["rejected"] > survey.info["rows"]:
        raise _no_rows(run, "more rows that can't be used than rows that can")
    return run.commit(ROWS, names, survey.info, survey.content)


@dataclass(frozen=True)
class _Survey:
    info: dict[str, Any]
    content: str


def _survey(run: Run, names: list[str]) -> _Survey:
    if not names:
        raise _no_rows(run)
    hashes = ["id", "content_hash", "label", "split"]
    columns = [*hashes, "embedding"]
    files = (io.BytesIO(run.store.read(f"{ROWS}/{name}")) for name in names)
    survey = pa.concat_tables([pq.read_table(file, columns=columns) for file in files]).sort_by("id")
    twice = [row_id for row_id, count in Counter(survey["id"].to_pylist()).items() if count > 1]
    if twice:
        raise DataError(f"source {run.config.data.source}: {len(twice)} ids come twice, e.g. {twice[0]}")
    num_rows = survey.num_rows
    # File names and block order are Ray Data's; what the rows are is not.
    content = sha256(canonical([survey[name].to_pylist() for name in hashes]) + matrix(survey, "embedding").tobytes())
    info = {
        "rows": num_rows,
        "rows_heldout": survey["split"].to_pylist().count(HELDOUT),
        "rejected": len(_rejected(run)),
        "duplicates": num_rows - len(set(survey["content_hash"].to_pylist())),
        "embedding_dim": survey.schema.field("embedding").type.list_size,
    }
    return _Survey(info, content)


def _no_rows(run: Run, what: str = "no row to train on") -> DataError:
    where = f"{run.url}: source {run.config.data.source} gave {what}"
    rejected = _rejected(run)
    if not rejected:
        return DataError(f"{where}; data.heldout is {run.config.data.heldout}")
    row_id, reason = min(rejected.items())
    return DataError(f"{where}: {len(rejected)} were rejected, e.g. {row_id} ({reason}); see {REJECTED}")


def _rejected(run: Run) -> dict[str, str]:
    """Reason by id."""
    found = [json.loads(run.store.read(f"{REJECTED}/{name}")) for name in run.store.sizes(REJECTED)]
    return {entry["id"]: entry["reason"] for entries in found for entry in entries}


def _reason(error: Exception) -> str:
    # Pillow's own message has a memory address in it.
    text = "not an image of a known format" if isinstance(error, UnidentifiedImageError) else str(error)
    return f"{type(error).__name__}: {' '.join(text.split())}"
