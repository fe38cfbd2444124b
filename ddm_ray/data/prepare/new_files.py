"""New files of a source, which no row of a run comes from yet: lists them for a run that appends them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ddm_ray.data.prepare.fit_embedder import PIXELS, embeds_pixels
from ddm_ray.data.prepare.make_rows import NETWORKS, NULL
from ddm_ray.data.prepare.records import RowsStore, SourcePlan, rows_store
from ddm_ray.data.sharded.kept_records import KeptRecords
from ddm_ray.data.sources import Listing, Source, absolute_name, open_source, units_of
from ddm_ray.data.sources import chunk_rows as rows_per_chunk
from ddm_ray.data.sources.collection import Collection
from ddm_ray.errors import DataError, MissingArtifact
from ddm_ray.plain_text import name_form
from ddm_ray.run.graph import ROWS
from ddm_ray.run.manifest import sha256
from ddm_ray.run.run import Run
from ddm_ray.spelling import some
from ddm_ray.store.checksummed import canonical


@dataclass(frozen=True)
class NewFiles:
    """The plan of new files, and the paths of other files that have changed or are gone.

    A file has changed if its size has; its content isn't read. A changed file's rows stay as they were prepared, unless
    the file was rejected: then it counts as new. `elsewhere`: paths that rows have already, but from another source;
    they are taken for the same files in another place. `listing`: hex digest of the new files' paths and sizes.
    """

    plan: SourcePlan
    changed: tuple[str, ...]
    gone: tuple[str, ...]
    elsewhere: tuple[str, ...]

    @property
    def files(self) -> dict[str, int]:
        """Sizes of the new files by their path below the source's root."""
        return _files(self.plan)

    @property
    def listing(self) -> str:
        """Hex digest of the new files' paths and sizes."""
        return sha256(canonical(self.files))


def rows_so_far(run: Run) -> list[RowsStore]:
    """The stores of all rows of a run, the most recently appended last. Raises MissingArtifact if some stayed behind.

    So do those of earlier files when a run is copied, and all of them when clusters leave and it is copied.
    """
    while run.base is not None and run.config.changes.appended is None:
        run = run.base
    if run.base is None and (run.config.changes.generation or not run.config.changes.pooled):
        raise MissingArtifact(
            f"{run.url}: is a copy without the rows that its clusters were made from, and their embedder: derive the"
            " run from the one that it was copied from"
        )
    return [*(rows_so_far(run.base) if run.base else ()), rows_store(run, ROWS)]


def list_joined(earlier: RowsStore, opened: Source, name: str, chunk_rows: int) -> SourcePlan:
    """The plan for rows of a source that form new clusters. Labels stand for the classes of `earlier` rows.

    Raises DataError for classes that these don't have, and as `Source.list`.
    """
    last, listed = _plan(earlier), opened.list()
    _require_classes(earlier.run, last, listed, name)
    rows = min(chunk_rows, listed.chunk_rows or chunk_rows)
    return SourcePlan(name, rows, last.classes, listed.units, listed.ignored, True, last.numbered)


def list_new(earlier: list[RowsStore], name: str, chunk_rows: int | None = None) -> NewFiles:
    """The files of source `name` that the runs' rows don't come from yet; there may be none.

    Raises DataError for a source without files, and for files of a class that the rows don't have; MissingArtifact for
    rows that `prepare` didn't make; and as `Source.list`, CorruptArtifact.
    """
    run, plans = earlier[-1].run, [_plan(chunks) for chunks in earlier]
    rows, last = chunk_rows or rows_per_chunk(run.config.data), plans[-1]
    known = {file: size for plan in plans for file, size in _files(plan).items()}
    opened = open_source(run.config.data, name, rows)
    listed = (replace(opened, known=frozenset(known)) if isinstance(opened, Collection) else opened).list()
    if any(not unit.files for unit in listed.units):
        raise DataError(f"source {name}: has no files that could be new; give a folder, tars or parquet files")
    _require_classes(run, last, listed, name)
    sizes = {file: size for unit in listed.units for file, size in zip(unit.files, unit.sizes, strict=True)}
    here = {file for plan in plans if absolute_name(plan.source) == name for file in _files(plan)}
    elsewhere = tuple(file for file in sizes if file in known and file not in here)
    changed = [file for file in here & sizes.keys() if known[file] != sizes[file]]
    mended = _rejected(earlier) & set(changed) if changed else set()
    new = {file: size for file, size in sizes.items() if file not in known or file in mended}
    before = {ending: count for plan in plans for ending, count in plan.ignored.items()}
    plan = SourcePlan(
        source=name,
        chunk_rows=min(rows, listed.chunk_rows or rows),
        classes=last.classes,
        units=units_of(new, rows),
        ignored={each: more for each, count in listed.ignored.items() if (more := count - before.get(each, 0)) > 0},
        bounded=True,
        numbered=last.numbered,
    )
    gone = {file for one in plans if absolute_name(one.source) == name for file in _files(one)} - sizes.keys()
    return NewFiles(plan, tuple(sorted(set(changed) - mended)), tuple(sorted(gone)), elsewhere)


def take_networks(chunks: RowsStore, earlier: RowsStore) -> None:
    """Store the networks of earlier rows, so that new rows are made with the same ones. Raises CorruptArtifact."""
    if embeds_pixels(chunks.run.config):
        chunks.write_once(PIXELS, ".safetensors", lambda: earlier.read_once(PIXELS))
    for pointer, suffix in ((NETWORKS, ".json"), (NULL, ".safetensors")):
        if earlier.store.exists(f"{earlier.artifact}/{pointer}"):
            data, _ = earlier.read_once(pointer)
            chunks.write_once(pointer, suffix, lambda data=data: (data, {}))  # type: ignore[misc]


def _require_classes(run: Run, last: SourcePlan, listed: Listing, name: str) -> None:
    if strays := sorted(set(listed.classes or ()) - set(map(name_form, last.classes or ()))):
        raise DataError(
            f"source {name}: classes that {run.url} doesn't have: {some(strays)}; its networks know no others: move"
            " them away, or begin a new run of all images"
        )
    if [*map(name_form, listed.numbered or ())] != [*map(name_form, last.numbered or ())]:
        raise DataError(f"source {name}: its numbers stand for other classes than those of {run.url}: begin a new run")


def _plan(chunks: RowsStore) -> SourcePlan:
    if plan := chunks.begun():
        return plan
    raise MissingArtifact(
        f"{chunks.url}: has no list of its files, as a copy of rows hasn't",
        "derive the run from the one in which they were prepared",
    )


def _files(plan: SourcePlan) -> dict[str, int]:
    return {file: size for unit in plan.units for file, size in zip(unit.files, unit.sizes, strict=True)}


def _rejected(earlier: list[RowsStore]) -> set[str]:
    """Ids of rejected rows."""
    ids = set[str]()
    for chunks in earlier:
        for record in KeptRecords.of(chunks):
            if record.reasons:
                rejected: list[Mapping[str, str]] = json.loads(chunks.read(record, record.reasons[0]))
                ids |= {row["id"] for row in rejected}
    return ids
