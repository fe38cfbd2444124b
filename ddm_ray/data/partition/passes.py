"""Executors of a partition's work, passes over all rows and the files of shards; the one of this process alone."""

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
    """The rows, the cluster of each, the plan of the shards' files, and the record of those that are written."""

    rows: "RowsReader"
    clusters: "RowClusters"
    plan: "FilePlan"
    made: "MadeFiles"

    def split(self, table: pa.Table, places: "Collection[int]") -> "Iterator[tuple[int, pa.Table]]":
        """Yield the rows of a table that files at these places get, with the place."""
        return self.plan.split(table, self.clusters(table), places)


class Executor(Protocol):
    """Does the work of a partition."""

    def session(self) -> AbstractContextManager[object]:
        """Open what is needed while there is something to do."""
        ...

    def each(
        self,
        rows: "RowsReader",
        make: Callable[[Iterator[pa.Table]], Iterator[T]],
        columns: list[str] | None,
        on_progress: OnProgress,
    ) -> Iterator[T]:
        """Yield what `make`, which can be pickled, makes of tables of some parts, and of others, until all were seen.

        Which parts come together, and in which order, is open. `columns`: as of `RowsReader.parts`.
        """
        ...

    def write(self, work: "FileWork", files: "Collection[ShardFile]", on_progress: OnProgress) -> "Iterator[MadeFile]":
        """Write these files of a plan, and yield those that were written: not those of shards that a rival finished."""
        ...


@dataclass(frozen=True)
class InProcess:
    """The executor without Ray: part after part."""

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
        """See `Executor`. All rows are read once for as many files as MEMORY_BYTES hold."""
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
