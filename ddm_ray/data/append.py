"""New files for the clusters of a run: looked for before a run with them is derived, and planned when it is begun."""

from ddm_ray.config.changes import Appended
from ddm_ray.data.prepare.new_files import NewFiles, list_new, rows_so_far
from ddm_ray.data.prepare.records import rows_store
from ddm_ray.data.sources import absolute_name
from ddm_ray.errors import ConfigError, DataError
from ddm_ray.run.graph import CENTROIDS, PARTITION, ROWS
from ddm_ray.run.run import Run


def look_for_new(base: Run, source: str | None = None, chunk_rows: int | None = None) -> NewFiles:
    """The files in the source of a run, or in another `source`, that none of its rows comes from.

    `chunk_rows`: see `prepare`. Raises MissingArtifact if the run has no partition; DataError if no file is new, and as
    `list_new`.
    """
    if base.config.partition.given:
        raise ConfigError(f"{base.url}: shards are given, each by an owner; an owner with more adds a cluster of them")
    if not base.config.changes.pooled:
        raise ConfigError(
            f"{base.url}: clusters left it, and with them the list of its files, so it isn't known which are new: add"
            " the new images as a cluster of their own"
        )
    for artifact in (ROWS, PARTITION, *([CENTROIDS] if base.config.partition.by_kmeans else [])):
        base.require(artifact)
    name = absolute_name(source or base.config.data.source)
    new = list_new(rows_so_far(base), name, chunk_rows)
    if not new.files:
        since = f"; {len(new.changed)} have changed, which stay as they were" if new.changed else ""
        raise DataError(f"source {name}: has no file that isn't in {base.url} already{since}; nothing to append")
    return new


def appended(new: NewFiles) -> Appended:
    """The record of new files in the configuration of a run."""
    return Appended(source=new.plan.source, files=len(new.files), listing=new.listing)


def plan_rows(run: Run, new: NewFiles) -> None:
    """Write the plan of a derived run's rows, unless there is one."""
    rows_store(run, ROWS).plan(lambda: new.plan)
