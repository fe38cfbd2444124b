"""Rows of shards for training and evaluation, in memory or streamed through windows.

N rows, B rows of a batch, M of them in one window, C channels, H x W pixels or latents, P channels of a pooled text.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from ddm_ray.config import DataConfig
from ddm_ray.core.augmentation import Views
from ddm_ray.core.condition import Condition, Text, TextIds
from ddm_ray.data.loading.cache import local_files
from ddm_ray.data.loading.shard_files import (
    files_of,
    first_rows,
    null_text_of,
    place_of_shard,
    require_shard,
    unreadable,
)
from ddm_ray.data.loading.stored_rows import StoredRows
from ddm_ray.data.loading.verified import VerifiedFile
from ddm_ray.data.loading.windows import WINDOW_BYTES, RowGroup, Window, WindowOrder
from ddm_ray.data.schema import TRAIN, read_parquet, shard_schema
from ddm_ray.data.text_encoding import encoded
from ddm_ray.data.texts import no_texts
from ddm_ray.errors import CorruptArtifact, DataError
from ddm_ray.memory import free_bytes
from ddm_ray.run.graph import Artifact
from ddm_ray.run.info import ShardInfo
from ddm_ray.run.run import Run

SHARE_OF_FREE_MEMORY = 0.25
HELD_WINDOWS = 3


@dataclass(frozen=True)
class Rows:
    """Rows of one split, sorted by id: data_NCHW float32 (pixels in [-1, 1]), label_N and cluster_N int64.

    If conditions are texts, every label is 0, and `text` has the texts if they were requested, with the `captions`
    that were encoded; shards of older versions have no captions.
    """

    ids: list[str]
    data_NCHW: Tensor
    label_N: Tensor
    cluster_N: Tensor
    text: Text | None = None
    captions: list[str] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def condition(self) -> Condition:
        """The rows' conditions: texts or labels."""
        return self.label_N if self.text is None else self.text


class LoadedBatch(NamedTuple):
    """Rows of a batch: data_BCHW float32, labels (int64), texts or texts' ids, and cluster_B int64."""

    data_BCHW: Tensor
    condition: Condition | TextIds
    cluster_B: Tensor


def load_rows(
    run: Run,
    artifacts: Sequence[Artifact],
    split: str = TRAIN,
    most: int | None = None,
    seed: int | None = None,
    with_texts: bool = True,
    device: str = "cpu",
) -> Rows:
    """The rows of one or more shards in memory. Their order doesn't depend on the order of `artifacts`.

    They are as they were prepared: only training draws views of them. If there are more than `most` rows, these are
    the first of each shard (`first_rows`), and no other file is read; with a `seed`, they are drawn uniformly from all
    files. Texts take far more memory than latents, so they are left out unless `with_texts`. Texts stored as ids are
    encoded on `device`.
    Raises MissingArtifact, DriftError, and CorruptArtifact for a file with another checksum than in its manifest.
    """
    config = run.config.data.model_copy(update={"horizontal_flips": False})
    if config.text is not None and not with_texts:
        config = config.model_copy(update={"text": None})
    schema = shard_schema(config).append(pa.field("text", pa.string())).append(pa.field("cluster", pa.int64()))
    tables = [schema.empty_table()]
    for table, cluster in _tables(run, artifacts, split, most, seed):
        if config.text is None and run.config.data.text is not None:
            table = table.append_column("label", pa.array(np.zeros(len(table), np.int64)))
        captions = table["text"] if "text" in table.column_names else pa.nulls(table.num_rows, pa.string())
        table = table.select(shard_schema(config).names).append_column("text", captions)
        tables.append(table.append_column("cluster", pa.array(np.full(table.num_rows, cluster, np.int64))))
    table = pa.concat_tables(tables).sort_by("id")
    stored = StoredRows(config, table.num_rows)
    stored.fill(0, table, table["cluster"].to_numpy())
    condition = stored.condition()
    if isinstance(condition, TextIds):
        assert config.text is not None
        condition = encoded(run, artifacts[0], condition, device) if len(table) else no_texts(config.text)
    text = None if isinstance(condition, Tensor) else condition
    labels_N = condition if isinstance(condition, Tensor) else torch.zeros(len(table), dtype=torch.int64)
    data_NCHW = torch.from_numpy(stored.modelled())
    captions = table["text"].to_pylist() if text is not None and not table["text"].null_count else None
    return Rows(table["id"].to_pylist(), data_NCHW, labels_N, torch.from_numpy(stored.cluster_N), text, captions)


def _tables(
    run: Run, artifacts: Sequence[Artifact], split: str, most: int | None, seed: int | None
) -> Iterator[tuple[pa.Table, int]]:
    """The rows of `load_rows` file by file, as they are stored, each with its cluster's position."""
    shares = first_rows(run, artifacts, split, None if seed is not None else most)
    total, first = sum(share.rows for share in shares), 0
    drawn_N = (
        None if seed is None else np.random.default_rng(seed).permutation(total) < (total if most is None else most)
    )
    for share in shares:
        artifact, left = Artifact(share.manifest.artifact), share.rows
        for name in share.files:
            if not left:
                break
            data = run.read(artifact, name, share.manifest)
            table = read_parquet(data, f"{run.url}/{artifact}/{name}").slice(0, left)
            left, first = left - table.num_rows, first + table.num_rows
            if drawn_N is not None:
                table = table.filter(pa.array(drawn_N[first - table.num_rows : first]))
            yield table, place_of_shard(run, share.manifest)
        if left:
            raise share.lacking(run)


class Loader:
    """The training rows of a job's shards, batch by batch, in the order of `WindowOrder`; a context manager.

    Rows are held in memory if their files have at most `rows_gib` GiB (None: a quarter of the free memory, shared by
    `ranks_here` processes). Otherwise they are streamed through at most three windows at a time. The order is the same.
    `cache`: folder for copies of shards in an object store, see `local_files`.
    """

    def __init__(
        self,
        run: Run,
        artifacts: Sequence[Artifact],
        seed: int,
        batch: int,
        rows_gib: float | None = None,
        cache: str | None = None,
        ranks_here: int = 1,
        window_bytes: int = WINDOW_BYTES,
    ):
        """Verify all files once.

        Raises MissingArtifact, DriftError, CorruptArtifact, StorageError, and DataError if there are no rows.
        """
        self._config, self._batch = _config_of(run, artifacts), batch
        # Each file, its name for error messages, and the position of its cluster.
        self._files: list[tuple[VerifiedFile, str, int]] = []
        groups: list[RowGroup] = []
        num_bytes = 0
        with ExitStack() as stack:
            for artifact in sorted(artifacts):
                manifest = require_shard(run, artifact)
                names = files_of(manifest, TRAIN)
                num_bytes += sum(manifest.files[name].bytes for name in names)
                files = stack.enter_context(local_files(run, manifest, names, cache))
                before = sum(group.rows for group in groups)
                for name, file in zip(names, files, strict=True):
                    where = f"{run.url}/{artifact}/{name}"
                    self._files.append((file, where, place_of_shard(run, manifest)))
                    groups += _groups(file, where, len(self._files) - 1)
                if sum(group.rows for group in groups) - before != ShardInfo.of(manifest).rows_train:
                    raise CorruptArtifact(
                        f"{run.url}/{artifact}: hasn't the rows that its manifest says", run.mend(artifact)
                    )
            if not groups:
                raise DataError(f"{run.url}: {', '.join(artifacts)} have no training row; partition more rows")
            self.null_text = null_text_of(run, min(artifacts))
            self._order = WindowOrder(groups, seed, window_bytes)
            limit = rows_gib * 2**30 if rows_gib is not None else SHARE_OF_FREE_MEMORY * free_bytes() / ranks_here
            self._memory = self._read(range(len(groups))) if num_bytes <= limit else None
            self._windows: OrderedDict[tuple[int, int], Future[StoredRows]] = OrderedDict()
            self._thread = ThreadPoolExecutor(1, "windows")
            stack.callback(self._thread.shutdown, cancel_futures=True)
            self._resources = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the thread that reads ahead, and remove a temporary copy."""
        self._windows.clear()
        self._resources.close()

    @property
    def num_rows(self) -> int:
        """Rows of an epoch."""
        return self._order.num_rows

    @property
    def in_memory(self) -> bool:
        """True if rows are held in memory rather than streamed."""
        return self._memory is not None

    def batch(self, step: int, place_B: Tensor, views: Views | None = None) -> LoadedBatch:
        """The rows at these places (int64) of global batch `step`, each in its view; None: as they were prepared.

        Raises CorruptArtifact for a file that changed after it was verified.
        """
        parts = self._order.locate(step * self._batch + place_B.numpy())
        batch = StoredRows(self._config, len(place_B))
        for part in parts:
            if self._memory is not None:
                batch.take(part.member_M, self._memory, self._order.stored_row(part))
            else:
                batch.take(part.member_M, self._window(part.window), part.row_M)
        if self._memory is None:
            self._read_ahead(self._order.after(parts[-1].window))
        data_BCHW = torch.from_numpy(batch.modelled(views))
        return LoadedBatch(data_BCHW, batch.condition(), torch.from_numpy(batch.cluster_N))

    def cluster_B(self, step: int, place_B: Tensor) -> Tensor:
        """Int64 (B,): the clusters of the rows at these places of global batch `step`, without reading the rows."""
        cluster_B = np.empty(len(place_B), np.int64)
        for part in self._order.locate(step * self._batch + place_B.numpy()):
            file_M = [self._order.groups[group].file for group in self._order.group(part).tolist()]
            cluster_B[part.member_M] = [self._files[file][2] for file in file_M]
        return torch.from_numpy(cluster_B)

    def _window(self, window: Window) -> "StoredRows":
        self._read_ahead(window)
        return self._windows[window.epoch, window.number].result()

    def _read_ahead(self, window: Window) -> None:
        """Start reading a window, and drop the least recently used ones to make room for it."""
        key = window.epoch, window.number
        if key not in self._windows:
            while len(self._windows) >= HELD_WINDOWS:
                self._windows.popitem(last=False)[1].cancel()
            self._windows[key] = self._thread.submit(self._read, window.groups)
        self._windows.move_to_end(key)

    def _read(self, numbers: Iterable[int]) -> "StoredRows":
        """The rows of these row groups, concatenated."""
        groups = [self._order.groups[number] for number in numbers]
        stored = StoredRows(self._config, sum(group.rows for group in groups))
        columns = [name for name in shard_schema(self._config).names if name != "id"]
        for first, group in zip(accumulate((group.rows for group in groups), initial=0), groups, strict=False):
            file, where, cluster = self._files[group.file]
            try:
                with file.opened() as path, pq.ParquetFile(path, page_checksum_verification=True) as parquet:
                    table = parquet.read_row_group(group.number, columns, use_threads=False)
                stored.fill(first, table, cluster)
            except (pa.ArrowException, OSError, KeyError, ValueError) as error:
                raise unreadable(f"{where}, row group {group.number}", error) from None
        return stored


def _groups(file: VerifiedFile, where: str, number: int) -> list[RowGroup]:
    """The row groups of file number `number`, by its footer."""
    try:
        with file.opened() as path:
            metadata = pq.read_metadata(path)
    except (pa.ArrowException, OSError) as error:
        raise unreadable(where, error) from None
    groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
    return [
        RowGroup(number, place, group.num_rows, group.total_byte_size)
        for place, group in enumerate(groups)
        if group.num_rows
    ]


def _config_of(run: Run, artifacts: Sequence[Artifact]) -> DataConfig:
    """The configuration of these artifacts' rows. Sampled images are already augmented."""
    data = run.config.data
    return data.unaugmented if any(artifact.kind == "replay" for artifact in artifacts) else data
