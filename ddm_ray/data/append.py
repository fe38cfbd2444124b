"""Append new files to a run: begin a run on its rows and on the new ones, with its weights as initial weights."""

from collections.abc import Mapping
from dataclasses import dataclass

from ddm_ray.config.longer import Part, continued
from ddm_ray.data.prepare.new_files import NewFiles, list_new, rows_so_far
from ddm_ray.data.prepare.records import rows_store
from ddm_ray.data.sources import absolute_name
from ddm_ray.errors import ConfigError, DataError
from ddm_ray.jobs.extend import reserve_extension
from ddm_ray.run.extension import Appended, Extension
from ddm_ray.run.graph import CENTROIDS, PARTITION, ROWS
from ddm_ray.run.run import Run
from ddm_ray.sampling.initial_weights import create_run, require_initial_weights


@dataclass(frozen=True)
class Appending:
    """The run that appends files to another run's, and the plan of these files."""

    run: Run
    new: NewFiles


def append(run: Run, steps: Mapping[Part, int], source: str | None = None, chunk_rows: int | None = None) -> Appending:
    """Begin a run that trains on the rows of `run`, and on rows of files that are new in its source or in `source`.

    Its jobs start from the weights of `run`, and train for so many `steps`, or for as many as before. Nothing is
    written to `run`. A call with the same files and steps names the same run, and finishes what a killed call began.
    `chunk_rows`: see `prepare`. Raises MissingArtifact if `run` has no partition, or a network of its mixture isn't
    trained; DataError if no file is new, and as `list_new`; ConfigError, CorruptArtifact, DriftError, StorageError.
    """
    if run.config.partition.given:
        raise ConfigError(
            f"{run.url}: its shards are given, each by an owner of images; an owner with more begins a run of them"
        )
    for artifact in (ROWS, PARTITION, *([CENTROIDS] if run.config.partition.by_kmeans else [])):
        run.require(artifact)
    name = absolute_name(source or run.config.data.source)
    new = list_new(rows_so_far(run), name, chunk_rows)
    if not new.files:
        since = f"; {len(new.changed)} have changed, which stay as they were" if new.changed else ""
        raise DataError(f"source {name}: has no file that isn't in {run.url} already{since}; nothing to append")
    base = absolute_name(run.url)
    require_initial_weights(continued(run.config, steps, base, name))  # raises before anything is written
    added = Appended(source=name, files=len(new.files), listing=new.listing)
    extension = Extension(steps=dict(steps), inherits=(), appends=added)
    url = reserve_extension(run, extension)
    create_run(url, extension.configure(run.config, base))
    begun = Run.open(url)
    rows_store(begun, ROWS).plan(lambda: new.plan)
    return Appending(begun, new)
