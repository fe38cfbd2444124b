"""Executors of a partition's work: passes over all rows, and shards' files. Has the one without Ray."""

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import pyarrow as pa

from ddm_ray.data import OnProgress, phase

if TYPE_CHECKING:
    from ddm_ray.data.partition.assignment import RowClusters
    from ddm_ray.data.partition.clustering import RowsReader
    from ddm_ray.data.partition.file_plan import FilePlan, ShardFile
    from ddm_ray.data.partition.made_files import MadeFile, MadeFiles

T = TypeVar("T")
MEMORY_BYTES = 2**30
"""Bytes of rows that this process holds at a time for the files that it writes."""


@dataclass(frozen=True)
class FileWork:
    """The rows, the clusters of rows, the plan of the shards' files, and the records of written files."""

    rows: "RowsReader"
    clusters: "RowClusters"
    plan: "FilePlan"
    made: "MadeFiles"

    def split(self, table: pa.Table, places: "Collection[int]") -> "Iterator[tuple[int, pa.Table]]":
        """Yield a table's rows that belong to the files at these places: the place, and the rows."""
        return self.plan.split(table, self.clusters(table), places)


class Executor(Protocol):
    """Does the work of a partition."""

    def session(self) -> AbstractContextManager[object]:
        """Open the resources for the work; entered only if there is some."""
        ...

    def each(
        self,
        rows: "RowsReader",
        make: Callable[[Iterator[pa.Table]], Iterator[T]],
        columns: list[str] | None,
        on_progress: OnProgress,
    ) -> Iterator[T]:
        """Apply `make`, which can be pickled, to tables of some parts at a time until all are seen; yield its results.

        The grouping and order of the parts are unspecified. `columns`: see `RowsReader.parts`.
        """
        ...

    def write(self, work: "FileWork", files: "Collection[ShardFile]", on_progress: OnProgress) -> "Iterator[MadeFile]":
        """Write these files of a plan, and yield the written ones. Skips files of shards that a rival has finished."""
        ...


@dataclass(frozen=True)
class InProcess:
    """The executor without Ray: one part after another."""

    session: Callable[[], AbstractContextManager[object]] = nullcontext

    def each(
        self,
        rows: "RowsReader",
        make: Callable[[Iterator[pa.Table]], Iterator[T]],
        columns: list[str] | None,
        on_progress: OnProgress,
    ) -> Iterator[T]:
        """See `Executor`."""
        return make(rows.parts(columns, on_progress))

    def write(self, work: "FileWork", files: "Collection[ShardFile]", on_progress: OnProgress) -> "Iterator[MadeFile]":
        """See `Executor`. Reads all rows once per group of files that fit into MEMORY_BYTES."""
        groups = work.plan.groups(files, MEMORY_BYTES)
        for number, group in enumerate(groups):
            tables: dict[int, list[pa.Table]] = {file.place: [] for file in group}
            progress = phase(on_progress, number / len(groups), (number + 1) / len(groups))
            for table in work.rows.parts(None, progress):
                for place, own in work.split(table, tables.keys()):
                    tables[place].append(own)
            for file in group:
                if (own := tables.pop(file.place)) and (written := work.made.write(file, pa.concat_tables(own))):
                    yield written
